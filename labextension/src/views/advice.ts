/**
 * Words for the states in which nothing new arrives: what is wrong, and what to do.
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import type { Feed } from '../model';

export interface IAdvice {
  readonly title: string;
  readonly paragraphs: ReadonlyArray<string>;
}

/** Null while all is well. */
export function adviceFor(
  feed: Feed,
  trans: TranslationBundle
): IAdvice | null {
  switch (feed.kind) {
    case 'live':
      return null;
    case 'connecting':
      return {
        title: trans.__('Connecting'),
        paragraphs: [
          trans.__('The Jupyter server is being asked for its devices.')
        ]
      };
    case 'no-coordinator':
      return {
        title: trans.__('No coordinator'),
        paragraphs: [
          feed.detail,
          trans.__(
            'The server goes on trying. Meanwhile regions wait or fail, and nobody is paused. If it lasts: run krex status in a terminal of this host, and see the log of the Jupyter server.'
          )
        ]
      };
    case 'disconnected':
      return {
        title: trans.__('Disconnected'),
        paragraphs: [
          trans.__(
            'The Jupyter server does not answer. See whether it still runs, and whether this computer is online; behind a proxy, whether it lets WebSockets through. Regions run on without this page.'
          )
        ]
      };
    case 'no-extension':
      return {
        title: trans.__('This server does not have KREX'),
        paragraphs: [
          trans.__(
            'The panel is installed, the server extension krex_jupyter is not loaded. Run jupyter server extension list in the environment of the server: install krex-jupyter there (pip install krex-jupyter) and restart the server.'
          )
        ]
      };
    case 'no-permission':
      return {
        title: trans.__('No permission'),
        paragraphs: [
          trans.__(
            'The server does not let you read KREX. Log in again; if that does not help, ask its administrator for access to the resource krex.'
          )
        ]
      };
    case 'mismatch':
      return {
        title: trans.__('Reload this page'),
        paragraphs: [
          trans.__(
            'The server and this page have different versions of KREX. Reload the page; if that does not help, install the same version of krex-jupyter for both and restart the server.'
          )
        ]
      };
  }
}

/** The state in a word or two, for the header of the panel. */
export function feedWords(feed: Feed, trans: TranslationBundle): string {
  switch (feed.kind) {
    case 'live':
      return trans.__('live');
    case 'connecting':
      return trans.__('connecting');
    case 'no-coordinator':
      return trans.__('no coordinator');
    case 'disconnected':
      return trans.__('disconnected');
    case 'no-extension':
      return trans.__('not on this server');
    case 'no-permission':
      return trans.__('no permission');
    case 'mismatch':
      return trans.__('reload this page');
  }
}
