/**
 * The one-line state of a kernel, for a notebook's toolbar and for the status bar: so that nobody mistakes a paused
 * kernel for a dead one. A mark and words tell the states apart; colour only helps.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { circled, running, shortened } from '../format';
import type { KrexModel } from '../model';
import { Standing, standingOf } from '../standing';
import { TickingWidget } from './ticking';

/** Longer names would push the time, or the whole item, out of a toolbar. */
const MOST_NAME = 18;

/** An estimate that has come down to this is over: it was one only, and says no more when. */
export const SOON_S = 0.1;

/** What is shown: a mark, words, and the words that a screen reader hears when the state changes. */
export interface IIndication {
  readonly mark: string;
  readonly words: string;
  readonly spoken: string;
  readonly hint: string;
}

export function indicationOf(
  standing: Standing,
  trans: TranslationBundle
): IIndication {
  switch (standing.kind) {
    case 'idle':
      return {
        mark: '○',
        words: trans.__('KREX'),
        spoken: trans.__('KREX: idle'),
        hint: trans.__(
          'KREX: this notebook neither holds a device nor waits for one. Click for the panel.'
        )
      };
    case 'queued':
      return {
        mark: circled(standing.position),
        words:
          standing.eta_s === null
            ? trans.__('queued')
            : standing.eta_s < SOON_S
              ? trans.__('queued · soon')
              : trans.__('queued · ≈ %1', running(standing.eta_s)),
        spoken: trans.__('KREX: queued as number %1', standing.position),
        hint: standing.waitsFor
      };
    case 'exclusive':
      switch (standing.phase) {
        case 'entering':
          return {
            mark: '◐',
            words: trans.__('entering'),
            spoken: trans.__('KREX: entering an exclusive region'),
            hint: trans.__('The others are being drained and paused.')
          };
        case 'held':
        case 'leaving':
          return {
            mark: '●',
            words: trans.__('exclusive %1', running(standing.held_s)),
            spoken: trans.__('KREX: exclusive'),
            hint:
              standing.remaining_s === null
                ? trans.__('This notebook has the device to itself.')
                : trans.__(
                    'This notebook has the device to itself, for %1 more at most.',
                    running(standing.remaining_s)
                  )
          };
      }
    // eslint-disable-next-line no-fallthrough -- every phase returns
    case 'paused': {
      const by = standing.by || trans.__('another process');
      return {
        mark: '❚❚',
        words: trans.__(
          'paused while %1 measures · %2',
          shortened(by, MOST_NAME),
          running(standing.paused_s)
        ),
        spoken: trans.__('Paused by KREX while %1 measures', by),
        hint: trans.__(
          'This kernel is not dead: KREX paused it while %1 measures, and it goes on by itself.',
          by
        )
      };
    }
    case 'connecting':
      return {
        mark: '◌',
        words: trans.__('KREX …'),
        spoken: trans.__('KREX: connecting'),
        hint: trans.__('KREX: connecting to the server.')
      };
    case 'no-coordinator':
      return warning(
        trans.__('KREX: no coordinator'),
        trans.__('Nobody coordinates this host now. Click for what to do.')
      );
    case 'disconnected':
      return warning(
        trans.__('KREX: disconnected'),
        trans.__('The Jupyter server does not answer. Click for what to do.')
      );
    case 'no-extension':
      return warning(
        trans.__('KREX: not on this server'),
        trans.__(
          'The Jupyter server does not have krex_jupyter. Click for what to do.'
        )
      );
    case 'no-permission':
      return warning(
        trans.__('KREX: no permission'),
        trans.__('The server does not let you see KREX. Click for what to do.')
      );
    case 'mismatch':
      return warning(
        trans.__('KREX: reload this page'),
        trans.__('Server and page have different versions of KREX.')
      );
  }
}

function warning(words: string, hint: string): IIndication {
  return { mark: '▲', words, spoken: words, hint };
}

export class IndicatorWidget extends TickingWidget {
  constructor(
    private readonly _options: {
      model: KrexModel;
      trans: TranslationBundle;
      kernelId: () => string | null;
      onClick: () => void;
      /** Only one of several indicators should speak. */
      speaks: boolean;
    }
  ) {
    super(_options.model);
    this.addClass('jp-krex-Indicator');
  }

  protected moves(): boolean {
    switch (this._standing().kind) {
      case 'queued':
      case 'exclusive':
      case 'paused':
        return true;
      case 'idle':
      case 'connecting':
      case 'no-coordinator':
      case 'disconnected':
      case 'no-extension':
      case 'no-permission':
      case 'mismatch':
        return false;
    }
  }

  protected render(): JSX.Element {
    const standing = this._standing();
    const { mark, words, spoken, hint } = indicationOf(
      standing,
      this._options.trans
    );
    return (
      <>
        <button
          type="button"
          className={`jp-krex-Indicator-button jp-krex-mod-${standing.kind}`}
          title={hint}
          onClick={this._options.onClick}
        >
          <span className="jp-krex-Indicator-mark" aria-hidden="true">
            {mark}
          </span>
          <span className="jp-krex-Indicator-words">{words}</span>
        </button>
        {this._options.speaks && (
          <span className="jp-krex-unseen" role="status">
            {spoken}
          </span>
        )}
      </>
    );
  }

  private _standing(): Standing {
    return standingOf(this.model, this._options.kernelId());
  }
}
