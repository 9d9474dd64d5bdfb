/**
 * What other extensions may ask for.
 */

import { Token } from '@lumino/coreutils';

import type { Connection } from './connection';
import type { KrexModel } from './model';

/** The coordinator as this page sees it, and the way to act on it. */
export interface IKrex {
  readonly model: KrexModel;
  readonly connection: Connection;
}

export const IKrex = new Token<IKrex>(
  'krex-jupyter:IKrex',
  'Who holds the devices of the host, who waits, and what was clean.'
);
