/**
 * The last seconds of a device as rows of spans: who held it, with which verdict, and who stood paused meanwhile.
 *
 * Pure: reports and a snapshot in, shares of the window out. Only what is known is drawn; what ended before the
 * page knew of it comes from its report.
 */

import { VERDICTS } from './fidelity';
import type { IRegionReport, IStatus, Verdict } from './protocol';
import { holders, shortName } from './standing';

/** A stretch of a row; `from` and `to` are shares of the window, 0 its beginning and 1 now. */
export type Span =
  | {
      readonly kind: 'region';
      readonly from: number;
      readonly to: number;
      /** Shares that entering and leaving took, before `from` and after `to`. */
      readonly enter: number;
      readonly exit: number;
      readonly verdict: Verdict;
      readonly report: IRegionReport;
    }
  | { readonly kind: 'holding'; readonly from: number; readonly to: number }
  | { readonly kind: 'paused'; readonly from: number; readonly to: number };

export interface IRow {
  readonly pid: number;
  readonly name: string;
  /** Nothing is ever done to it: it is only watched. */
  readonly observed: boolean;
  /** It is no more. */
  readonly gone: boolean;
  readonly spans: ReadonlyArray<Span>;
}

export const MOST_ROWS = 10;
/** Spans nearer to each other than this share of the window cannot be told apart, and are drawn as one. */
export const RESOLUTION = 1 / 250;

/** Rows of a device, those with most recent activity first; `more` counts those left out. */
export function timelineOf(options: {
  status: IStatus;
  reports: ReadonlyArray<IRegionReport>;
  device: string;
  /** Unix time of the host. */
  now_s: number;
  window_s: number;
  /** Seconds since `status` was true. */
  age_s: number;
}): { rows: IRow[]; more: number } {
  const { status, device, now_s, window_s } = options;
  const begin_s = now_s - window_s;
  const share = (at_s: number): number =>
    Math.min(1, Math.max(0, (at_s - begin_s) / window_s));
  const spans = new Map<number, Span[]>();
  const names = new Map<number, string>();
  const last_s = new Map<number, number>();

  const add = (pid: number, span: Span, until_s: number): void => {
    const row = spans.get(pid);
    if (row === undefined) {
      spans.set(pid, [span]);
    } else {
      row.push(span);
    }
    last_s.set(pid, Math.max(last_s.get(pid) ?? 0, until_s));
  };

  for (const report of options.reports) {
    const ended_s = report.started_at + report.held_s;
    const touches =
      report.device.uuid === device ||
      report.devices.some(one => one.uuid === device);
    if (!touches || ended_s + report.exit_s < begin_s) {
      continue;
    }
    names.set(report.pid, names.get(report.pid) ?? shortName(report));
    add(
      report.pid,
      {
        kind: 'region',
        from: share(report.started_at),
        to: share(ended_s),
        enter:
          share(report.started_at) - share(report.started_at - report.enter_s),
        exit: share(ended_s + report.exit_s) - share(ended_s),
        verdict: report.verdict,
        report
      },
      ended_s
    );
    for (const sibling of report.siblings) {
      if (sibling.gate !== 'observe') {
        names.set(
          sibling.pid,
          names.get(sibling.pid) ?? (sibling.label || `pid ${sibling.pid}`)
        );
        add(
          sibling.pid,
          {
            kind: 'paused',
            from: share(report.started_at - report.enter_s),
            to: share(ended_s + report.exit_s)
          },
          0
        );
      }
    }
  }

  const holder =
    holders(status).find(one => one.devices.includes(device)) ?? null;
  if (holder !== null && holder.phase !== 'entering') {
    const from = share(now_s - holder.held_s - options.age_s);
    add(holder.pid, { kind: 'holding', from, to: 1 }, now_s);
  }
  const observed = new Set<number>();
  const participants = status.participants.filter(one => !one.protected);
  for (const participant of participants) {
    names.set(participant.pid, shortName(participant));
    if (!participant.joined && participant.gpu_library !== true) {
      observed.add(participant.pid);
    }
    if (holder !== null && participant.paused_by === holder.region_id) {
      const paused_s = Math.max(0, participant.paused_s) + options.age_s;
      add(
        participant.pid,
        { kind: 'paused', from: share(now_s - paused_s), to: 1 },
        0
      );
    }
  }

  const living = new Set(participants.map(one => one.pid));
  const pids = new Set([...living, ...spans.keys()]);
  const rows = [...pids]
    .map((pid): IRow => ({
      pid,
      name: names.get(pid) ?? `pid ${pid}`,
      observed: observed.has(pid) && !spans.has(pid),
      gone: !living.has(pid),
      spans: merged(spans.get(pid) ?? [])
    }))
    .filter(row => !row.gone || row.spans.some(one => one.kind === 'region'));
  // A row keeps its place while its process lives, or the picture could not be followed; those who held anything
  // in the window come first where not all fit.
  const shown = [...rows]
    .sort(
      (one, other) =>
        Number(last_s.has(other.pid)) - Number(last_s.has(one.pid)) ||
        Number(one.observed) - Number(other.observed) ||
        one.pid - other.pid
    )
    .slice(0, MOST_ROWS);
  shown.sort(
    (one, other) =>
      Number(one.observed) - Number(other.observed) ||
      one.name.localeCompare(other.name) ||
      one.pid - other.pid
  );
  return { rows: shown, more: rows.length - shown.length };
}

/** What can be told apart of a row's spans, regions last, so that they are drawn above the pauses they cause. */
function merged(spans: ReadonlyArray<Span>): Span[] {
  const pauses: Span[] = [];
  const regions: Array<Extract<Span, { kind: 'region' }>> = [];
  const holding: Span[] = [];
  const inOrder = [...spans].sort((one, other) => one.from - other.from);
  for (const span of inOrder) {
    switch (span.kind) {
      case 'paused': {
        const last = pauses[pauses.length - 1];
        if (last !== undefined && span.from - last.to < RESOLUTION) {
          pauses[pauses.length - 1] = {
            ...last,
            to: Math.max(last.to, span.to)
          };
        } else {
          pauses.push(span);
        }
        break;
      }
      case 'region': {
        const last = regions[regions.length - 1];
        if (last !== undefined && span.to - last.from < RESOLUTION) {
          // Of several regions in one spot the worst is shown.
          if (rank(span.verdict) > rank(last.verdict)) {
            regions[regions.length - 1] = span;
          }
        } else {
          regions.push(span);
        }
        break;
      }
      case 'holding':
        holding.push(span);
        break;
    }
  }
  return [...pauses, ...regions, ...holding];
}

function rank(verdict: Verdict): number {
  return VERDICTS.indexOf(verdict);
}
