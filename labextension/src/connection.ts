/**
 * The browser's way to the server: the event socket, the REST routes, the clock.
 *
 * Everything goes through the settings of Jupyter's own connection, so that base URLs, tokens, cookies and proxies
 * are respected. Answers are unknown until checked.
 */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { DisposableDelegate, IDisposable } from '@lumino/disposable';

import { Check, parse } from './check';
import type {
  IClock,
  ISocketHandlers,
  ITransport,
  KrexModel,
  Refusal
} from './model';
import {
  checkErrorBody,
  checkHistory,
  checkRegionReport,
  IRegionReport
} from './protocol';

const API = 'krex/api';

/** An answer that is not what was asked for: what happened, and what to do. */
export class RequestFailed extends Error {
  constructor(
    message: string,
    readonly whatToDo: string
  ) {
    super(message);
  }
}

export class Connection implements ITransport {
  constructor(private readonly _settings: ServerConnection.ISettings) {}

  open(handlers: ISocketHandlers): IDisposable {
    const { wsUrl, token, appendToken, WebSocket } = this._settings;
    const query =
      appendToken && token !== '' ? `?token=${encodeURIComponent(token)}` : '';
    const socket = new WebSocket(URLExt.join(wsUrl, API, 'events') + query);
    socket.onmessage = (event: MessageEvent<unknown>) => {
      if (typeof event.data === 'string') {
        handlers.message(event.data);
      }
    };
    socket.onclose = () => handlers.closed();
    return new DisposableDelegate(() => {
      socket.onmessage = null;
      socket.onclose = null;
      socket.close();
    });
  }

  async refusal(): Promise<Refusal> {
    const response = await this._request('status').catch(() => null);
    if (response?.status === 401 || response?.status === 403) {
      return 'no-permission';
    }
    return response?.status === 404 ? 'no-extension' : 'unreachable';
  }

  async history(since: number): Promise<ReadonlyArray<IRegionReport> | null> {
    const query = `history?limit=1000&since=${Math.max(0, since).toFixed(3)}`;
    try {
      return (await this._ask(query, checkHistory)).reports;
    } catch {
      return null;
    }
  }

  /** The report of a region that ended; rejects with `RequestFailed`. */
  async report(regionId: string): Promise<IRegionReport> {
    return this._ask(regionPath(regionId), checkRegionReport);
  }

  /** Ends a region, or leaves the queue; rejects with `RequestFailed`. */
  async end(regionId: string): Promise<void> {
    await this._answered(
      this._request(regionPath(regionId), { method: 'DELETE' })
    );
  }

  private async _ask<T>(path: string, check: Check<T>): Promise<T> {
    const response = await this._answered(this._request(path));
    const value = parse(await response.text(), check);
    if (value === null) {
      throw new RequestFailed(
        'The server answered with something else than was asked for.',
        'Reload this page: the server may have been updated.'
      );
    }
    return value;
  }

  private async _answered(request: Promise<Response>): Promise<Response> {
    let response: Response;
    try {
      response = await request;
    } catch {
      throw new RequestFailed(
        'The Jupyter server does not answer.',
        'See whether it still runs, and whether this computer is online.'
      );
    }
    if (!response.ok) {
      const body = parse(await response.text(), checkErrorBody);
      throw new RequestFailed(
        body?.message ?? `HTTP ${response.status} ${response.statusText}`,
        body?.what_to_do ?? 'The log of the Jupyter server has the details.'
      );
    }
    return response;
  }

  private _request(path: string, init: RequestInit = {}): Promise<Response> {
    const url = URLExt.join(this._settings.baseUrl, API) + '/' + path;
    return ServerConnection.makeRequest(url, init, this._settings);
  }
}

export const browserClock: IClock = {
  now_s: () => Date.now() / 1000,
  after: (delay_s, call) => {
    const timer = setTimeout(call, delay_s * 1000);
    return new DisposableDelegate(() => clearTimeout(timer));
  }
};

/**
 * Follows the browser's own knowledge of its network: a socket over a network that went does not close for minutes.
 * Disposing the result ends that.
 */
export function followNetwork(model: KrexModel): IDisposable {
  const connect = (): void => model.connect();
  const lose = (): void => model.disconnect();
  window.addEventListener('online', connect);
  window.addEventListener('offline', lose);
  return new DisposableDelegate(() => {
    window.removeEventListener('online', connect);
    window.removeEventListener('offline', lose);
  });
}

function regionPath(regionId: string): string {
  return `regions/${encodeURIComponent(regionId)}`;
}
