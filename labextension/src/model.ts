/**
 * What the browser knows of the coordinator: fed by one WebSocket, a snapshot and then changes.
 *
 * No DOM, no clock and no network of its own: both are passed in, so that tests can move them. It never invents:
 * while nothing arrives, `feed` says why, and times stand still where they were last known.
 */

import type { IDisposable, IObservableDisposable } from '@lumino/disposable';
import { ISignal, Signal } from '@lumino/signaling';

import { parse } from './check';
import { checkToBrowser, IRegionReport, IStatus, ToBrowser } from './protocol';

/** Where the data comes from now, or why none comes. */
export type Feed =
  | { readonly kind: 'connecting' }
  | { readonly kind: 'live' }
  /** The server answers, and has no coordinator. */
  | { readonly kind: 'no-coordinator'; readonly detail: string }
  /** The server does not answer; `retry_s` is when it is asked again, by the clock. */
  | { readonly kind: 'disconnected'; readonly retry_s: number }
  | { readonly kind: 'no-extension'; readonly retry_s: number }
  | { readonly kind: 'no-permission'; readonly retry_s: number }
  /** The server's messages have a shape that this page does not know. */
  | { readonly kind: 'mismatch' };

/** Why a socket could not be opened: a browser does not tell, a plain request does. */
export type Refusal = 'unreachable' | 'no-extension' | 'no-permission';

export interface ISocketHandlers {
  message(text: string): void;
  closed(): void;
}

export interface ITransport {
  /** Opens the event socket. Disposing the result closes it, without a call of `closed`. */
  open(handlers: ISocketHandlers): IDisposable;
  /** Finds out why the socket does not open. Never rejects. */
  refusal(): Promise<Refusal>;
  /** Reports since a Unix time, newest first; null where they cannot be had. Never rejects. */
  history(since: number): Promise<ReadonlyArray<IRegionReport> | null>;
}

export interface IClock {
  /** Unix time. */
  now_s(): number;
  /** Calls back once; disposing the result prevents that. */
  after(delay_s: number, call: () => void): IDisposable;
}

export const REPORTS_KEPT = 1000;
export const HISTORY_S = 3600;
/** Seconds before the first try to connect again; doubled with every failure up to the most. */
export const BACKOFF_FIRST_S = 0.5;
export const BACKOFF_MOST_S = 15;
/** Where an answer settles the matter, only an installation or a login changes it: ask rarely. */
export const BACKOFF_REFUSED_S = 60;

export class KrexModel implements IObservableDisposable {
  constructor(options: {
    transport: ITransport;
    clock: IClock;
    /** In [0, 1): spreads the browsers of a server that comes back. */
    random?: () => number;
  }) {
    this._transport = options.transport;
    this._clock = options.clock;
    this._random = options.random ?? Math.random;
  }

  /** Something that a view shows may have changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get disposed(): ISignal<this, void> {
    return this._disposed;
  }

  get feed(): Feed {
    return this._feed;
  }

  /** The last snapshot, stale or not; null before the first. */
  get status(): IStatus | null {
    return this._status;
  }

  /** Newest first: at least those of the last hour, up to `REPORTS_KEPT`. */
  get reports(): ReadonlyArray<IRegionReport> {
    return this._reports;
  }

  /** What `status` shows was true once, and may not be now. */
  get stale(): boolean {
    return this._feed.kind !== 'live';
  }

  /** Ids of the kernels of this server: their regions are the user's own. */
  get ownKernels(): ReadonlySet<string> {
    return this._ownKernels;
  }

  set ownKernels(ids: ReadonlySet<string>) {
    const same =
      ids.size === this._ownKernels.size &&
      [...ids].every(id => this._ownKernels.has(id));
    if (!same) {
      this._ownKernels = ids;
      this._changed.emit();
    }
  }

  /** Seconds since the snapshot was true; stands still once it is stale. */
  get age_s(): number {
    const until_s = this._staleSince_s ?? this._clock.now_s();
    return Math.max(0, until_s - this._statusAt_s);
  }

  /** Unix time on the coordinator's host, as far as its messages tell; stands still once data is stale. */
  get hostNow_s(): number {
    return (this._staleSince_s ?? this._clock.now_s()) - (this._skew_s ?? 0);
  }

  /** Seconds until the next try to connect; null where none is planned. */
  get retryIn_s(): number | null {
    const feed = this._feed;
    return 'retry_s' in feed
      ? Math.max(0, feed.retry_s - this._clock.now_s())
      : null;
  }

  /** Begins; and later begins at once instead of waiting for the next try. */
  connect(): void {
    if (this._isDisposed) {
      return;
    }
    this._retry?.dispose();
    this._retry = null;
    this._socket?.dispose();
    if (this._status === null && this._feed.kind !== 'connecting') {
      this._setFeed({ kind: 'connecting' });
    }
    let opened = false;
    this._socket = this._transport.open({
      message: text => {
        opened = true;
        this._failures = 0;
        this._take(text);
      },
      closed: () => {
        this._socket = null;
        void this._retryLater(opened);
      }
    });
  }

  /** The network is known to be gone: what is shown is stale from now on, until the next try succeeds. */
  disconnect(): void {
    if (this._isDisposed || this._socket === null) {
      return;
    }
    this._socket.dispose();
    this._socket = null;
    void this._retryLater(true);
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    this._retry?.dispose();
    this._socket?.dispose();
    this._disposed.emit();
    Signal.clearData(this);
  }

  private _take(text: string): void {
    const message = parse(text, checkToBrowser);
    if (message === null) {
      this._setFeed({ kind: 'mismatch' });
      return;
    }
    switch (message.type) {
      case 'status':
        this._takeStatus(message);
        this._addReports(message.recent);
        this._fetchHistory();
        break;
      case 'event':
        this._takeEvent(message);
        break;
      case 'unavailable':
        this._observeSkew(message.at);
        this._historyFetched = false;
        this._setFeed({ kind: 'no-coordinator', detail: message.detail });
        break;
    }
  }

  private _takeEvent(event: Extract<ToBrowser, { type: 'event' }>): void {
    this._observeSkew(event.at);
    if (event.report !== null) {
      this._addReports([event.report]);
    }
    if (event.status !== null) {
      this._takeStatus(event.status);
    } else if (event.kind === 'notice' && this._status !== null) {
      const notices = [...this._status.notices, event.detail];
      this._status = { ...this._status, notices };
      this._changed.emit();
    } else if (event.report !== null) {
      this._changed.emit();
    }
  }

  private _takeStatus(status: IStatus): void {
    this._status = status;
    this._statusAt_s = this._clock.now_s();
    this._setFeed({ kind: 'live' });
  }

  /** The least difference seen between our clock and the host's: what is above it is the way of the message. */
  private _observeSkew(at_s: number): void {
    const skew_s = this._clock.now_s() - at_s;
    this._skew_s = Math.min(this._skew_s ?? skew_s, skew_s);
  }

  private _addReports(reports: ReadonlyArray<IRegionReport>): void {
    const known = new Set(this._reports.map(report => report.region_id));
    const fresh = reports.filter(report => !known.has(report.region_id));
    if (fresh.length > 0) {
      this._reports = [...fresh, ...this._reports]
        .sort((one, other) => other.started_at - one.started_at)
        .slice(0, REPORTS_KEPT);
    }
  }

  /** A snapshot carries the last reports only; the last hour is asked for once per coordinator. */
  private _fetchHistory(): void {
    if (this._historyFetched) {
      return;
    }
    this._historyFetched = true;
    void this._transport.history(this.hostNow_s - HISTORY_S).then(reports => {
      if (reports !== null && !this._isDisposed) {
        this._addReports(reports);
        this._changed.emit();
      }
    });
  }

  private async _retryLater(wasOpen: boolean): Promise<void> {
    const refusal = wasOpen ? 'unreachable' : await this._transport.refusal();
    if (this._isDisposed || this._socket !== null) {
      return;
    }
    this._historyFetched = false;
    const backoff_s = Math.min(
      BACKOFF_FIRST_S * 2 ** this._failures,
      BACKOFF_MOST_S
    );
    this._failures += 1;
    const delay_s =
      refusal === 'unreachable'
        ? backoff_s * (0.75 + 0.5 * this._random())
        : BACKOFF_REFUSED_S;
    const retry_s = this._clock.now_s() + delay_s;
    this._setFeed({
      kind: refusal === 'unreachable' ? 'disconnected' : refusal,
      retry_s
    });
    this._retry = this._clock.after(delay_s, () => this.connect());
  }

  private _setFeed(feed: Feed): void {
    if (feed.kind === 'live') {
      this._staleSince_s = null;
    } else {
      this._staleSince_s ??= this._clock.now_s();
    }
    this._feed = feed;
    this._changed.emit();
  }

  private readonly _transport: ITransport;
  private readonly _clock: IClock;
  private readonly _random: () => number;
  private readonly _disposed = new Signal<this, void>(this);
  private readonly _changed = new Signal<this, void>(this);
  private _feed: Feed = { kind: 'connecting' };
  private _status: IStatus | null = null;
  private _statusAt_s = 0;
  private _staleSince_s: number | null = null;
  private _skew_s: number | null = null;
  private _reports: ReadonlyArray<IRegionReport> = [];
  private _ownKernels: ReadonlySet<string> = new Set();
  private _historyFetched = false;
  private _failures = 0;
  private _socket: IDisposable | null = null;
  private _retry: IDisposable | null = null;
  private _isDisposed = false;
}
