/**
 * A clock that tests move and a server that tests speak for.
 */

import { DisposableDelegate, IDisposable } from '@lumino/disposable';

import type { IClock, ISocketHandlers, ITransport, Refusal } from '../model';
import type { IRegionReport } from '../protocol';
import messages from './messages.json';

export type MessageName = keyof typeof messages;

export function textOf(name: MessageName): string {
  return JSON.stringify(messages[name]);
}

export class Clock implements IClock {
  now = 1_800_000_001;
  private _waiting: Array<{ at: number; call: () => void }> = [];

  now_s(): number {
    return this.now;
  }

  after(delay_s: number, call: () => void): IDisposable {
    const entry = { at: this.now + delay_s, call };
    this._waiting.push(entry);
    return new DisposableDelegate(() => {
      this._waiting = this._waiting.filter(one => one !== entry);
    });
  }

  get pending(): number {
    return this._waiting.length;
  }

  advance(by_s: number): void {
    this.now += by_s;
    const due = this._waiting.filter(one => one.at <= this.now);
    this._waiting = this._waiting.filter(one => one.at > this.now);
    for (const one of due) {
      one.call();
    }
  }
}

export class Server implements ITransport {
  sockets: ISocketHandlers[] = [];
  open_ = 0;
  why: Refusal = 'unreachable';
  past: ReadonlyArray<IRegionReport> | null = [];
  asked: number[] = [];

  open(handlers: ISocketHandlers): IDisposable {
    this.sockets.push(handlers);
    this.open_ += 1;
    return new DisposableDelegate(() => {
      this.open_ -= 1;
    });
  }

  refusal(): Promise<Refusal> {
    return Promise.resolve(this.why);
  }

  history(since: number): Promise<ReadonlyArray<IRegionReport> | null> {
    this.asked.push(since);
    return Promise.resolve(this.past);
  }

  send(name: MessageName): void {
    this.say(textOf(name));
  }

  say(text: string): void {
    this.sockets[this.sockets.length - 1]?.message(text);
  }

  async drop(): Promise<void> {
    this.open_ -= 1;
    this.sockets[this.sockets.length - 1]?.closed();
    await settled();
  }
}

/** All promises that are ready have called back. */
export async function settled(): Promise<void> {
  for (let turn = 0; turn < 10; turn += 1) {
    await Promise.resolve();
  }
}
