/**
 * Names and marks of verdicts: no verdict is told by its colour alone.
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import type { Verdict } from '../protocol';

export const VERDICT_MARKS: Readonly<Record<Verdict, string>> = {
  clean: '✓',
  suspect: '!',
  contended: '×',
  revoked: '⊘',
  unknown: '?'
};

export function verdictName(
  verdict: Verdict,
  trans: TranslationBundle
): string {
  switch (verdict) {
    case 'clean':
      return trans.__('clean');
    case 'suspect':
      return trans.__('suspect');
    case 'contended':
      return trans.__('contended');
    case 'revoked':
      return trans.__('revoked');
    case 'unknown':
      return trans.__('unknown');
  }
}
