/**
 * The side panel: for each device its holder, its queue, the last seconds and the last hour; and where nothing of
 * that can be shown, what is wrong and what to do.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import { LabIcon } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import * as React from 'react';

import { CommandIDs } from '../commands';
import { fidelityOf, VERDICTS } from '../fidelity';
import { bytes, cssShare, duration, running } from '../format';
import { HISTORY_S, KrexModel } from '../model';
import type {
  IDeviceStatus,
  IHolderStatus,
  IRegionReport,
  IStatus,
  IWaiterStatus
} from '../protocol';
import {
  etaOf,
  holdTimes,
  isMoving,
  isOwn,
  labelBeside,
  mayEnd,
  nameOf,
  notebookToOpen
} from '../standing';
import { timelineOf } from '../timeline';
import { adviceFor, feedWords } from './advice';
import { SOON_S } from './indicator';
import { TickingWidget } from './ticking';
import { Legend, Timeline } from './timeline';
import { VERDICT_MARKS, verdictName } from './verdicts';

const LAST_REPORTS = 5;

interface IShared {
  readonly model: KrexModel;
  readonly status: IStatus;
  readonly commands: CommandRegistry;
  readonly trans: TranslationBundle;
  readonly window_s: number;
}

export class PanelWidget extends TickingWidget {
  constructor(
    private readonly _options: {
      model: KrexModel;
      commands: CommandRegistry;
      trans: TranslationBundle;
      icon: LabIcon;
    }
  ) {
    super(_options.model);
    const { trans, icon } = _options;
    this.id = 'krex-panel';
    this.title.icon = icon;
    this.title.caption = trans.__('KREX: who holds the device');
    this.addClass('jp-krex-Panel');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('KREX'));
  }

  /** Length of the timeline in seconds. */
  get window_s(): number {
    return this._window_s;
  }

  set window_s(value: number) {
    this._window_s = value;
    this.onChanged();
  }

  protected moves(): boolean {
    return isMoving(this.model, this._window_s);
  }

  protected render(): JSX.Element {
    const { model, commands, trans } = this._options;
    const { status } = model;
    return (
      <>
        <header className="jp-krex-Panel-header">
          <h2>{trans.__('KREX')}</h2>
          <span
            className={`jp-krex-feed jp-krex-mod-${model.feed.kind}`}
            role="status"
          >
            <span className="jp-krex-feed-mark" aria-hidden="true">
              {model.stale ? '○' : '●'}
            </span>
            {feedWords(model.feed, trans)}
          </span>
        </header>
        <Advice model={model} commands={commands} trans={trans} />
        {status !== null && (
          <div
            className={`jp-krex-Panel-body${model.stale ? ' jp-krex-mod-stale' : ''}`}
            aria-busy={model.stale}
          >
            <Notices status={status} trans={trans} />
            {status.devices.map((entry, index) => (
              <Device
                key={entry.device.uuid}
                entry={entry}
                index={index}
                shared={{
                  model,
                  status,
                  commands,
                  trans,
                  window_s: this._window_s
                }}
              />
            ))}
            {status.devices.every(one => one.device.vendor === 'cpu') && (
              <NoGpu trans={trans} />
            )}
          </div>
        )}
      </>
    );
  }

  private _window_s = 30;
}

/** What is wrong and what to do; nothing while all is well. */
function Advice(props: {
  model: KrexModel;
  commands: CommandRegistry;
  trans: TranslationBundle;
}): JSX.Element | null {
  const { model, commands, trans } = props;
  const advice = adviceFor(model.feed, trans);
  if (advice === null) {
    return null;
  }
  const retry_s = model.retryIn_s;
  return (
    <section
      className={`jp-krex-Advice jp-krex-mod-${model.feed.kind}`}
      role="alert"
      aria-label={advice.title}
    >
      <h3>{advice.title}</h3>
      {advice.paragraphs.map(text => (
        <p key={text}>{text}</p>
      ))}
      {model.status !== null && (
        <p className="jp-krex-faint">
          {trans.__(
            'Below is what was last known; it may not be true any more.'
          )}
        </p>
      )}
      {model.feed.kind !== 'connecting' && (
        <div className="jp-krex-actions">
          {retry_s !== null && (
            <span className="jp-krex-faint" aria-hidden="true">
              {trans.__('Trying again in %1 s', Math.ceil(retry_s))}
            </span>
          )}
          <button
            type="button"
            className="jp-krex-button"
            onClick={() => void commands.execute(CommandIDs.reconnect)}
          >
            {trans.__('Try now')}
          </button>
        </div>
      )}
    </section>
  );
}

function Notices(props: {
  status: IStatus;
  trans: TranslationBundle;
}): JSX.Element | null {
  const { status, trans } = props;
  if (status.notices.length === 0) {
    return null;
  }
  return (
    <details className="jp-krex-Notice">
      <summary>
        {trans._n('%1 notice', '%1 notices', status.notices.length)}
      </summary>
      <ul>
        {status.notices.map((text, index) => (
          <li key={index}>{text}</li>
        ))}
      </ul>
    </details>
  );
}

function NoGpu(props: { trans: TranslationBundle }): JSX.Element {
  const { trans } = props;
  return (
    <section className="jp-krex-Notice" aria-label={trans.__('No GPU')}>
      <h3>{trans.__('No GPU was found on this host')}</h3>
      <p>
        {trans.__(
          'Regions use the cpu device: the others are paused while one measures. If there should be a GPU, run %1 in a terminal: it says why it is missing.',
          'krex devices'
        )}
      </p>
    </section>
  );
}

function Device(props: {
  entry: IDeviceStatus;
  index: number;
  shared: IShared;
}): JSX.Element {
  const { entry, index, shared } = props;
  const { model, status, trans, window_s } = shared;
  const { device, holder, queue } = entry;
  const name =
    device.vendor === 'cpu'
      ? 'cpu'
      : `${driverName(device.vendor)}:${device.index ?? '?'}`;
  const { rows, more } = timelineOf({
    status,
    reports: model.reports,
    device: device.uuid,
    now_s: model.hostNow_s,
    window_s,
    age_s: model.age_s
  });
  const facts = [
    device.memory_bytes === null ? '' : bytes(device.memory_bytes),
    device.gates.length === 0
      ? trans.__('no gate')
      : trans.__('gate: %1', device.gates[0] ?? '')
  ].filter(text => text !== '');
  const reports = model.reports
    .filter(one => one.device.uuid === device.uuid)
    .slice(0, LAST_REPORTS);
  return (
    <section
      className="jp-krex-Device"
      aria-label={trans.__('Device %1', name)}
    >
      <div className="jp-krex-Device-head">
        <h3>
          {name}{' '}
          <span className="jp-krex-faint">
            {device.name === name ? '' : device.name}
          </span>
        </h3>
        <StateBadge holder={holder} waiting={queue.length} trans={trans} />
      </div>
      <p className="jp-krex-faint">{facts.join(' · ')}</p>
      {device.note !== '' && <p className="jp-krex-faint">{device.note}</p>}
      {holder === null ? (
        <p className="jp-krex-Empty">
          {trans.__('Nobody holds it: the next region begins at once.')}
        </p>
      ) : (
        <Holder holder={holder} shared={shared} />
      )}
      <h4>
        {trans.__('Waiting')}{' '}
        <span className="jp-krex-faint">{queue.length}</span>
      </h4>
      {queue.length === 0 ? (
        <p className="jp-krex-Empty">{trans.__('Nobody waits.')}</p>
      ) : (
        <ol
          className="jp-krex-Queue"
          aria-label={trans.__('Queue of %1', name)}
        >
          {queue.map(waiter => (
            <Waiter key={waiter.region_id} waiter={waiter} shared={shared} />
          ))}
        </ol>
      )}
      <h4>{trans.__('Last %1 seconds', window_s)}</h4>
      {rows.length === 0 ? (
        <p className="jp-krex-Empty">
          {trans.__(
            'No notebook takes part yet. Run %load_ext krex_jupyter in one, or use krex_jupyter.exclusive().'
          )}
        </p>
      ) : (
        <>
          <Timeline
            rows={rows}
            more={more}
            window_s={window_s}
            trans={trans}
            id={String(index)}
          />
          <Legend trans={trans} />
        </>
      )}
      <Fidelity device={device.uuid} shared={shared} />
      <h4>{trans.__('Last regions')}</h4>
      {reports.length === 0 ? (
        <p className="jp-krex-Empty">{trans.__('None is on record yet.')}</p>
      ) : (
        <ul
          className="jp-krex-Reports"
          aria-label={trans.__('Last regions of %1', name)}
        >
          {reports.map(report => (
            <Report key={report.region_id} report={report} shared={shared} />
          ))}
        </ul>
      )}
    </section>
  );
}

function StateBadge(props: {
  holder: IHolderStatus | null;
  waiting: number;
  trans: TranslationBundle;
}): JSX.Element {
  const { holder, trans } = props;
  if (holder === null) {
    return (
      <span className="jp-krex-Badge jp-krex-mod-idle">{trans.__('idle')}</span>
    );
  }
  switch (holder.phase) {
    case 'entering':
      return (
        <span className="jp-krex-Badge jp-krex-mod-entering">
          {trans.__('entering')}
        </span>
      );
    case 'held':
      return (
        <span className="jp-krex-Badge jp-krex-mod-exclusive">
          {trans.__('exclusive')}
        </span>
      );
    case 'leaving':
      return (
        <span className="jp-krex-Badge jp-krex-mod-entering">
          {trans.__('leaving')}
        </span>
      );
  }
}

function Holder(props: {
  holder: IHolderStatus;
  shared: IShared;
}): JSX.Element {
  const { holder, shared } = props;
  const { model, commands, trans } = shared;
  const { held_s, remaining_s } = holdTimes(holder, model.age_s);
  const limit_s = remaining_s === null ? null : held_s + remaining_s;
  const sentences = [
    trans._n('%1 paused', '%1 paused', holder.siblings_gated),
    trans._n('%1 observed', '%1 observed', holder.siblings_observed),
    remaining_s === null
      ? trans.__('no time limit')
      : trans.__('ends by itself in %1', running(remaining_s))
  ];
  return (
    <div
      className="jp-krex-Holder"
      role="group"
      aria-label={trans.__('Holder')}
    >
      <div className="jp-krex-Entry-line">
        <Who who={holder} shared={shared} />
        <span
          className="jp-krex-figure"
          aria-label={trans.__('held for %1', running(held_s))}
        >
          {running(held_s)}
        </span>
      </div>
      {limit_s !== null && (
        <div className="jp-krex-Meter" aria-hidden="true">
          <div
            style={{
              width: cssShare(limit_s > 0 ? Math.min(1, held_s / limit_s) : 0)
            }}
          />
        </div>
      )}
      <div className="jp-krex-Entry-line">
        <span className="jp-krex-faint">
          {sentences.join(' · ')}
          {holder.notice !== '' && (
            <strong className="jp-krex-warn">{` · ${trans.__('held long')}`}</strong>
          )}
        </span>
        {mayEnd(model, holder) && (
          <button
            type="button"
            className="jp-krex-button"
            title={trans.__(
              'The others go on at once; the verdict of this region will be revoked.'
            )}
            aria-label={trans.__('End the region of %1', nameOf(holder))}
            onClick={() =>
              void commands.execute(CommandIDs.end, {
                region_id: holder.region_id
              })
            }
          >
            {trans.__('End')}
          </button>
        )}
      </div>
    </div>
  );
}

function Waiter(props: {
  waiter: IWaiterStatus;
  shared: IShared;
}): JSX.Element {
  const { waiter, shared } = props;
  const { model, commands, trans } = shared;
  const eta_s = etaOf(waiter, model.age_s);
  return (
    <li value={waiter.position} title={waiter.waits_for}>
      <div className="jp-krex-Entry-line">
        <Who who={waiter} shared={shared} />
        <span className="jp-krex-Entry-end">
          <span
            className="jp-krex-figure"
            title={trans.__(
              'waited %1',
              running(waiter.waited_s + model.age_s)
            )}
          >
            {eta_s === null
              ? trans.__('since %1', running(waiter.waited_s + model.age_s))
              : eta_s < SOON_S
                ? trans.__('soon')
                : trans.__('≈ %1', running(eta_s))}
          </span>
          {mayEnd(model, waiter) && (
            <button
              type="button"
              className="jp-krex-button"
              aria-label={trans.__('Take %1 out of the queue', nameOf(waiter))}
              onClick={() =>
                void commands.execute(CommandIDs.end, {
                  region_id: waiter.region_id
                })
              }
            >
              {trans.__('Leave')}
            </button>
          )}
        </span>
      </div>
    </li>
  );
}

/** A process by its notebook, which opens where this server has it; whose it is; the region's label. */
function Who(props: {
  who: { pid: number; uid: number; notebook: string; label: string };
  shared: IShared;
}): JSX.Element {
  const { who, shared } = props;
  const { model, commands, trans } = shared;
  const path = notebookToOpen(model, who.pid);
  const label = labelBeside(who);
  const owner = isOwn(model, who.pid)
    ? trans.__('you')
    : trans.__('uid %1', who.uid);
  return (
    <span className="jp-krex-Who">
      {path === '' ? (
        <strong title={trans.__('pid %1', who.pid)}>{nameOf(who)}</strong>
      ) : (
        <button
          type="button"
          className="jp-krex-link"
          title={trans.__('Open %1 (pid %2)', path, who.pid)}
          onClick={() =>
            void commands.execute(CommandIDs.openNotebook, { path })
          }
        >
          {nameOf(who)}
        </button>
      )}
      <span className="jp-krex-faint">
        {label === '' ? owner : `${owner} · “${label}”`}
      </span>
    </span>
  );
}

function Fidelity(props: { device: string; shared: IShared }): JSX.Element {
  const { device, shared } = props;
  const { model, trans } = shared;
  const { total, counts, reasons } = fidelityOf(
    model.reports,
    device,
    model.hostNow_s - HISTORY_S
  );
  return (
    <>
      <h4>
        {trans.__('Fidelity')}{' '}
        <span className="jp-krex-faint">{trans.__('last hour')}</span>
      </h4>
      {total === 0 ? (
        <p className="jp-krex-Empty">
          {trans.__('No region ended in the last hour.')}
        </p>
      ) : (
        <>
          <div
            className="jp-krex-Share"
            role="img"
            aria-label={VERDICTS.filter(one => counts[one] > 0)
              .map(one => `${counts[one]} ${verdictName(one, trans)}`)
              .join(', ')}
          >
            {VERDICTS.filter(one => counts[one] > 0).map(one => (
              <span
                key={one}
                className={`jp-krex-verdict-${one}`}
                style={{ flexGrow: counts[one] }}
              />
            ))}
          </div>
          <p>
            <strong>{counts.clean}</strong> {trans.__('of %1 clean', total)}
            {VERDICTS.filter(one => one !== 'clean' && counts[one] > 0).map(
              one =>
                ` · ${VERDICT_MARKS[one]} ${counts[one]} ${verdictName(one, trans)}`
            )}
          </p>
          {reasons.length > 0 && (
            <ul className="jp-krex-Reasons" aria-label={trans.__('Reasons')}>
              {reasons.map(({ code, count, detail }) => (
                <li key={code}>
                  {count} × <code>{code}</code>
                  <span title={detail}>{detail}</span>
                </li>
              ))}
            </ul>
          )}
        </>
      )}
    </>
  );
}

function Report(props: {
  report: IRegionReport;
  shared: IShared;
}): JSX.Element {
  const { report, shared } = props;
  const { commands, trans } = shared;
  return (
    <li
      className="jp-krex-Entry-line"
      title={report.reasons
        .map(({ code, detail }) => `${code}: ${detail}`)
        .join('\n')}
    >
      <span className={`jp-krex-Verdict jp-krex-verdict-${report.verdict}`}>
        {`${VERDICT_MARKS[report.verdict]} ${verdictName(report.verdict, trans)}`}
      </span>
      <Who
        who={{
          pid: report.pid,
          uid: report.uid,
          notebook: report.notebook,
          label: report.label
        }}
        shared={shared}
      />
      <span className="jp-krex-Entry-end">
        <span className="jp-krex-figure">{duration(report.held_s)}</span>
        <button
          type="button"
          className="jp-krex-button"
          title={trans.__('Copy the report as JSON')}
          aria-label={trans.__(
            'Copy the report of region %1',
            report.region_id
          )}
          onClick={() =>
            void commands.execute(CommandIDs.copyReport, {
              region_id: report.region_id
            })
          }
        >
          {trans.__('Copy')}
        </button>
      </span>
    </li>
  );
}

function driverName(vendor: 'nvidia' | 'amd'): string {
  return vendor === 'nvidia' ? 'cuda' : 'hip';
}
