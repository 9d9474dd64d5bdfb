/**
 * How trustworthy the regions of the last hour were: counts by verdict and by reason. Pure.
 */

import type { IRegionReport, Verdict } from './protocol';

/** From best to worst; `unknown` last, for it says least. */
export const VERDICTS: ReadonlyArray<Verdict> = [
  'clean',
  'suspect',
  'contended',
  'revoked',
  'unknown'
];

export interface IFidelity {
  readonly total: number;
  readonly counts: Readonly<Record<Verdict, number>>;
  /** Most frequent first; `detail` is the sentence of the newest. */
  readonly reasons: ReadonlyArray<{
    readonly code: string;
    readonly count: number;
    readonly detail: string;
  }>;
}

/** Of the regions of a device that began after a Unix time; `reports` is newest first. */
export function fidelityOf(
  reports: ReadonlyArray<IRegionReport>,
  device: string,
  since_s: number
): IFidelity {
  const counts: Record<Verdict, number> = {
    clean: 0,
    suspect: 0,
    contended: 0,
    revoked: 0,
    unknown: 0
  };
  const reasons = new Map<string, { count: number; detail: string }>();
  let total = 0;
  for (const report of reports) {
    if (report.started_at < since_s || report.device.uuid !== device) {
      continue;
    }
    total += 1;
    counts[report.verdict] += 1;
    if (report.verdict === 'clean') {
      continue;
    }
    for (const { code, detail } of report.reasons) {
      const known = reasons.get(code);
      reasons.set(code, {
        count: (known?.count ?? 0) + 1,
        detail: known?.detail ?? detail
      });
    }
  }
  return {
    total,
    counts,
    reasons: [...reasons]
      .map(([code, one]) => ({ code, ...one }))
      .sort((one, other) => other.count - one.count)
  };
}
