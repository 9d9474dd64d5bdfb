import { parse } from '../check';
import { fidelityOf } from '../fidelity';
import { BACKOFF_MOST_S, BACKOFF_REFUSED_S, KrexModel } from '../model';
import {
  checkErrorBody,
  checkHistory,
  checkStatus,
  checkToBrowser
} from '../protocol';
import { isMoving, mayEnd, notebookToOpen, standingOf } from '../standing';
import { timelineOf } from '../timeline';
import { Clock, MessageName, Server, settled, textOf } from './world';

function connected(): { model: KrexModel; server: Server; clock: Clock } {
  const clock = new Clock();
  const server = new Server();
  const model = new KrexModel({ transport: server, clock, random: () => 0.5 });
  model.connect();
  return { model, server, clock };
}

describe('the messages of the server', () => {
  it.each<MessageName>([
    'status',
    'event',
    'status_event',
    'notice',
    'unavailable'
  ])('%s, as Python writes it, is accepted', name => {
    expect(parse(textOf(name), checkToBrowser)).not.toBeNull();
  });

  it('answers of the REST routes are accepted', () => {
    expect(parse(textOf('history'), checkHistory)?.reports).toHaveLength(2);
    expect(parse(textOf('error'), checkErrorBody)?.code).toBe('not_found');
  });

  it.each(['', '<html>', 'null', '[]', '{"type":"status"}', '"status"'])(
    'anything else is not: %s',
    text => {
      expect(parse(text, checkToBrowser)).toBeNull();
    }
  );

  it('a field more is ignored, a field of another type is not', () => {
    const status = JSON.parse(textOf('status')) as Record<string, unknown>;
    expect(checkStatus({ ...status, more: 1 })).toBe(true);
    expect(checkStatus({ ...status, system: 'no' })).toBe(false);
  });
});

describe('KrexModel', () => {
  it('is live from the first snapshot on', () => {
    const { model, server } = connected();
    expect(model.feed.kind).toBe('connecting');
    server.send('status');
    expect(model.feed.kind).toBe('live');
    expect(model.status?.devices).toHaveLength(2);
    expect(model.reports.map(one => one.region_id)).toEqual(['r2']);
  });

  it('asks for the last hour once per snapshot of a coordinator', async () => {
    const { model, server } = connected();
    server.past = parse(textOf('history'), checkHistory)?.reports ?? null;
    server.send('status');
    server.send('status');
    await settled();
    expect(server.asked).toHaveLength(1);
    expect(model.reports.map(one => one.region_id)).toEqual(['r2', 'r1']);
  });

  it('adds the report of a region that ended, once', () => {
    const { model, server } = connected();
    server.send('status');
    server.send('event');
    server.send('event');
    expect(model.reports.map(one => one.region_id)).toEqual(['r3', 'r2']);
  });

  it('adds a notice to those of the snapshot', () => {
    const { model, server } = connected();
    server.send('status');
    server.send('notice');
    expect(model.status?.notices).toHaveLength(2);
  });

  it('lets times run while live, and stand still once stale', async () => {
    const { model, server, clock } = connected();
    server.send('status');
    clock.advance(2);
    expect(model.age_s).toBeCloseTo(2);
    await server.drop();
    const now_s = model.hostNow_s;
    clock.advance(0.1);
    expect(model.stale).toBe(true);
    expect(model.age_s).toBeCloseTo(2);
    expect(model.hostNow_s).toBe(now_s);
    expect(model.status).not.toBeNull();
  });

  it('learns the clock of the host from what events are stamped with', () => {
    const { model, server, clock } = connected();
    clock.now = 1_800_000_100;
    server.send('status_event');
    expect(model.hostNow_s).toBeCloseTo(1_800_000_000.6);
  });

  it('tells a server without a coordinator, and recovers', () => {
    const { model, server } = connected();
    server.send('status');
    server.send('unavailable');
    expect(model.feed).toEqual({
      kind: 'no-coordinator',
      detail: 'The coordinator ended; another is being started.'
    });
    expect(model.retryIn_s).toBeNull();
    server.send('status');
    expect(model.feed.kind).toBe('live');
  });

  it('connects again, with growing pauses up to a limit', async () => {
    const { model, server, clock } = connected();
    const pauses: number[] = [];
    for (let failure = 0; failure < 8; failure += 1) {
      await server.drop();
      expect(model.feed.kind).toBe('disconnected');
      const pause = model.retryIn_s ?? 0;
      pauses.push(Number(pause.toFixed(3)));
      clock.advance(pause);
    }
    expect(pauses).toEqual([0.5, 1, 2, 4, 8, 15, 15, BACKOFF_MOST_S]);
    server.send('status');
    expect(model.feed.kind).toBe('live');
    await server.drop();
    expect(model.retryIn_s).toBeCloseTo(0.5);
  });

  it.each(['no-extension', 'no-permission'] as const)(
    'tells %s, and asks again only rarely',
    async why => {
      const { model, server } = connected();
      server.why = why;
      await server.drop();
      expect(model.feed.kind).toBe(why);
      expect(model.retryIn_s).toBe(BACKOFF_REFUSED_S);
    }
  );

  it('connects at once when told to, with one socket', async () => {
    const { model, server, clock } = connected();
    await server.drop();
    model.connect();
    model.connect();
    expect(server.open_).toBe(1);
    expect(clock.pending).toBe(0);
  });

  it('is stale as soon as the network is known to be gone', async () => {
    const { model, server } = connected();
    server.send('status');
    model.disconnect();
    await settled();
    expect(model.feed.kind).toBe('disconnected');
    expect(server.open_).toBe(0);
    model.connect();
    server.send('status');
    expect(model.feed.kind).toBe('live');
  });

  it('asks for a reload where messages cannot be read, and goes on reading', () => {
    const { model, server } = connected();
    server.say('{"type":"status"}');
    expect(model.feed.kind).toBe('mismatch');
    server.send('status');
    expect(model.feed.kind).toBe('live');
  });

  it('tells its views of every change, and of nothing once disposed', async () => {
    const { model, server, clock } = connected();
    let changes = 0;
    model.changed.connect(() => {
      changes += 1;
    });
    server.send('status');
    expect(changes).toBe(1);
    model.ownKernels = new Set(['k1']);
    model.ownKernels = new Set(['k1']);
    expect(changes).toBe(2);
    await settled();
    const before = changes;
    model.dispose();
    expect(server.open_).toBe(0);
    expect(clock.pending).toBe(0);
    server.send('status');
    await settled();
    expect(changes).toBe(before);
  });

  it('opens nothing when a refusal arrives after it was disposed', async () => {
    const { model, server, clock } = connected();
    const dropped = server.drop();
    model.dispose();
    await dropped;
    expect(clock.pending).toBe(0);
  });
});

describe('where a kernel stands', () => {
  it('is read from the snapshot, and runs with the clock', () => {
    const { model, server, clock } = connected();
    server.send('status');
    clock.advance(0.2);
    expect(standingOf(model, 'k1')).toMatchObject({
      kind: 'exclusive',
      regionId: 'r4'
    });
    expect(standingOf(model, 'k2')).toMatchObject({
      kind: 'queued',
      position: 1
    });
    const queued = standingOf(model, 'k2');
    expect(queued.kind === 'queued' && queued.eta_s).toBeCloseTo(0.4);
    const paused = standingOf(model, 'k4');
    expect(paused).toMatchObject({ kind: 'paused', by: 'tune-matmul' });
    expect(paused.kind === 'paused' && paused.paused_s).toBeCloseTo(0.6);
    expect(standingOf(model, 'k5')).toEqual({ kind: 'idle' });
    expect(standingOf(model, null)).toEqual({ kind: 'idle' });
  });

  it('is not known while nothing arrives', () => {
    const { model, server } = connected();
    server.send('status');
    server.send('unavailable');
    expect(standingOf(model, 'k4')).toEqual({ kind: 'no-coordinator' });
  });

  it('tells who may be ended and opened', () => {
    const { model, server } = connected();
    server.send('status');
    expect(mayEnd(model, { pid: 999, uid: 1234 })).toBe(true);
    expect(notebookToOpen(model, 101)).toBe('');
    model.ownKernels = new Set(['k1']);
    expect(notebookToOpen(model, 101)).toBe('work/tune-matmul.ipynb');
    server.send('unavailable');
    expect(mayEnd(model, { pid: 101, uid: 1000 })).toBe(false);
  });

  it('of a system coordinator lets only the own uid be ended', () => {
    const { model, server } = connected();
    server.say(textOf('status').replace('"system":false', '"system":true'));
    model.ownKernels = new Set(['k1']);
    expect(mayEnd(model, { pid: 999, uid: 1000 })).toBe(true);
    expect(mayEnd(model, { pid: 999, uid: 1001 })).toBe(false);
  });

  it('moves while somebody holds or waits, and rests when stale', () => {
    const { model, server } = connected();
    expect(isMoving(model, 30)).toBe(false);
    server.send('status');
    expect(isMoving(model, 30)).toBe(true);
    server.send('unavailable');
    expect(isMoving(model, 30)).toBe(false);
  });
});

describe('the timeline', () => {
  function drawn(now_s: number): ReturnType<typeof timelineOf> {
    const status = parse(textOf('status'), checkStatus);
    if (status === null) {
      throw new Error('the fixture is no status');
    }
    const reports = parse(textOf('history'), checkHistory)?.reports ?? [];
    return timelineOf({
      status,
      reports,
      device: 'GPU-1b2c',
      now_s,
      window_s: 30,
      age_s: 0
    });
  }

  it('has a row per process, the observed last, servers not at all', () => {
    const { rows } = drawn(1_800_000_000);
    expect(rows.map(row => row.name)).toEqual([
      'agent-3',
      'idle',
      'softmax',
      'tune-matmul',
      'train-lora'
    ]);
    expect(rows.map(row => row.observed)).toEqual([
      false,
      false,
      false,
      false,
      true
    ]);
  });

  it('places a region by its report, and the pause of its siblings around it', () => {
    const { rows } = drawn(1_800_000_000);
    const region = rows[3].spans.find(span => span.kind === 'region');
    expect(region?.from).toBeCloseTo(20 / 30);
    expect(region?.to).toBeCloseTo(20.12 / 30);
    const pauses = rows[1].spans.filter(span => span.kind === 'paused');
    expect(pauses).toHaveLength(2);
    expect(pauses[0].from).toBeCloseTo((20 - 0.006) / 30);
    expect(pauses[1].to).toBe(1);
  });

  it('draws the held region up to now', () => {
    const { rows } = drawn(1_800_000_000);
    const holding = rows[3].spans.find(span => span.kind === 'holding');
    expect(holding?.from).toBeCloseTo(29.5 / 30);
    expect(holding?.to).toBe(1);
  });

  it('draws as one what cannot be told apart, and the worst of it', () => {
    const status = parse(textOf('status'), checkStatus);
    const one = (parse(textOf('history'), checkHistory)?.reports ?? [])[0];
    if (status === null) {
      throw new Error('the fixture is no status');
    }
    const reports = Array.from({ length: 600 }, (_, index) => ({
      ...one,
      region_id: `many${index}`,
      started_at: 1_800_000_000 - index * 0.05,
      held_s: 0.01,
      verdict: index === 300 ? ('contended' as const) : one.verdict
    }));
    const { rows } = timelineOf({
      status,
      reports,
      device: 'GPU-1b2c',
      now_s: 1_800_000_000.02,
      window_s: 30,
      age_s: 0
    });
    for (const row of rows) {
      expect(row.spans.length).toBeLessThanOrEqual(252);
    }
    const regions = rows[3].spans.filter(span => span.kind === 'region');
    expect(
      regions.some(
        span => span.kind === 'region' && span.verdict === 'contended'
      )
    ).toBe(true);
    expect(rows[1].spans.filter(span => span.kind === 'paused')).toHaveLength(
      1
    );
  });

  it('forgets what is older than its window', () => {
    const { rows } = drawn(1_800_000_031);
    expect(rows[3].spans.some(span => span.kind === 'region')).toBe(false);
  });
});

describe('fidelity', () => {
  it('counts verdicts, and reasons with the newest sentence', () => {
    const { model, server } = connected();
    server.send('status');
    server.send('event');
    const { total, counts, reasons } = fidelityOf(model.reports, 'GPU-1b2c', 0);
    expect(total).toBe(2);
    expect(counts).toMatchObject({ clean: 1, contended: 1 });
    expect(reasons).toEqual([
      {
        code: 'foreign_gpu_work',
        count: 1,
        detail: 'train-lora (pid 105) is not paused.'
      }
    ]);
    expect(fidelityOf(model.reports, 'cpu', 0).total).toBe(0);
    expect(fidelityOf(model.reports, 'GPU-1b2c', 1_800_000_000).total).toBe(1);
  });
});
