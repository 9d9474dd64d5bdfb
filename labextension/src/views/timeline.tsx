/**
 * Draws the timeline of a device: a row per process, regions marked by verdict, pauses hatched.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { VERDICTS } from '../fidelity';
import { cssShare, duration } from '../format';
import type { Verdict } from '../protocol';
import type { IRow, Span } from '../timeline';
import { verdictName } from './verdicts';

const ROW_HEIGHT = 14;
const BAR_TOP = 2;
const BAR_HEIGHT = 10;
/** Regions of milliseconds must be seen, too. */
const LEAST_WIDTH_PX = 3;

export function Timeline(props: {
  rows: ReadonlyArray<IRow>;
  more: number;
  window_s: number;
  trans: TranslationBundle;
  /** Makes ids of patterns unique in the page. */
  id: string;
}): JSX.Element {
  const { rows, trans, window_s } = props;
  const hatch = `jp-krex-hatch-${props.id}`;
  const third = Math.round(window_s / 3);
  return (
    <div className="jp-krex-Timeline">
      <svg
        width="0"
        height="0"
        aria-hidden="true"
        className="jp-krex-Timeline-defs"
      >
        <defs>
          <pattern
            id={hatch}
            width="6"
            height="6"
            patternUnits="userSpaceOnUse"
            patternTransform="rotate(45)"
          >
            <rect width="6" height="6" className="jp-krex-hatch-ground" />
            <rect width="3" height="6" className="jp-krex-hatch-stripe" />
          </pattern>
        </defs>
      </svg>
      <ul className="jp-krex-Timeline-rows" role="list">
        {rows.map(row => (
          <li key={row.pid} className="jp-krex-Timeline-row" role="listitem">
            <span
              className={`jp-krex-Timeline-name${row.gone ? ' jp-krex-mod-gone' : ''}`}
              title={trans.__('%1 (pid %2)', row.name, row.pid)}
            >
              {row.name}
            </span>
            <svg
              className="jp-krex-Timeline-bar"
              height={ROW_HEIGHT}
              role="img"
              aria-label={summaryOf(row, trans)}
            >
              <rect
                className={`jp-krex-ground${row.observed || row.gone ? ' jp-krex-mod-observed' : ''}`}
                x="0.5"
                y={BAR_TOP + 0.5}
                height={BAR_HEIGHT - 1}
                rx="2"
                style={{ width: 'calc(100% - 1px)' }}
              />
              {row.spans.map((span, index) => (
                <SpanShape
                  key={keyOf(span, index)}
                  span={span}
                  hatch={hatch}
                  trans={trans}
                />
              ))}
            </svg>
          </li>
        ))}
      </ul>
      <div className="jp-krex-Timeline-axis" aria-hidden="true">
        <span>{trans.__('−%1 s', window_s)}</span>
        <span>{`−${window_s - third}`}</span>
        <span>{`−${window_s - 2 * third}`}</span>
        <span>{trans.__('now')}</span>
      </div>
      {props.more > 0 && (
        <p className="jp-krex-Timeline-more jp-krex-faint">
          {trans._n('and %1 more', 'and %1 more', props.more)}
        </p>
      )}
    </div>
  );
}

/** Explains shapes and colours. */
export function Legend(props: { trans: TranslationBundle }): JSX.Element {
  const { trans } = props;
  const verdict = (name: Verdict): JSX.Element => (
    <span className="jp-krex-Legend-entry" key={name}>
      <svg
        className={`jp-krex-Legend-shape jp-krex-verdict-${name}`}
        width="12"
        height={ROW_HEIGHT}
        aria-hidden="true"
      >
        <VerdictShape verdict={name} x="3px" width="6px" />
      </svg>
      {verdictName(name, trans)}
    </span>
  );
  return (
    <div className="jp-krex-Legend">
      {VERDICTS.map(verdict)}
      <span className="jp-krex-Legend-entry">
        <span
          className="jp-krex-Legend-swatch jp-krex-mod-holding"
          aria-hidden="true"
        />
        {trans.__('holding')}
      </span>
      <span className="jp-krex-Legend-entry">
        <span
          className="jp-krex-Legend-swatch jp-krex-mod-paused"
          aria-hidden="true"
        />
        {trans.__('paused')}
      </span>
      <span className="jp-krex-Legend-entry">
        <span
          className="jp-krex-Legend-swatch jp-krex-mod-running"
          aria-hidden="true"
        />
        {trans.__('running')}
      </span>
      <span className="jp-krex-Legend-entry">
        <span
          className="jp-krex-Legend-swatch jp-krex-mod-observed"
          aria-hidden="true"
        />
        {trans.__('only observed')}
      </span>
    </div>
  );
}

/**
 * A region by its verdict, told by its shape, too: clean is whole, suspect has the gap of an exclamation mark,
 * contended is crossed, revoked is hollow, unknown is dotted.
 */
function VerdictShape(props: {
  verdict: Verdict;
  x: string;
  width: string;
}): JSX.Element {
  const { verdict, x, width } = props;
  const part = (y: number, height: number, key = 0): JSX.Element => (
    <rect
      key={key}
      className="jp-krex-span-region"
      x={x}
      y={y}
      height={height}
      rx="1"
      style={{ width }}
    />
  );
  switch (verdict) {
    case 'clean':
      return part(0, ROW_HEIGHT);
    case 'suspect':
      return (
        <>
          {part(0, 9, 0)}
          {part(11, 3, 1)}
        </>
      );
    case 'contended':
      return (
        <>
          {part(0, ROW_HEIGHT)}
          <rect
            className="jp-krex-span-region"
            x={x}
            y={ROW_HEIGHT / 2 - 1.5}
            height={3}
            style={{
              width: `calc(${width} + 6px)`,
              transform: 'translateX(-3px)'
            }}
          />
        </>
      );
    case 'revoked':
      return (
        <rect
          className="jp-krex-span-hollow"
          x={x}
          y={1}
          height={ROW_HEIGHT - 2}
          rx="1"
          style={{ width: `max(4px, ${width})` }}
        />
      );
    case 'unknown':
      return <>{[0, 5, 10].map(y => part(y, 4, y))}</>;
  }
}

function SpanShape(props: {
  span: Span;
  hatch: string;
  trans: TranslationBundle;
}): JSX.Element {
  const { span, hatch, trans } = props;
  const place = {
    x: cssShare(span.from),
    y: BAR_TOP,
    width: cssShare(span.to - span.from),
    height: BAR_HEIGHT
  };
  const wideEnough = {
    width: `max(${LEAST_WIDTH_PX}px, ${cssShare(span.to - span.from)})`
  };
  switch (span.kind) {
    case 'paused':
      return <rect {...place} fill={`url(#${hatch})`} />;
    case 'holding':
      return (
        <rect
          className="jp-krex-span-holding"
          x={place.x}
          y={0}
          height={ROW_HEIGHT}
          rx="1.5"
          style={wideEnough}
        />
      );
    case 'region': {
      const { report, verdict } = span;
      return (
        <g className={`jp-krex-verdict-${verdict}`}>
          <title>
            {trans.__(
              '%1: held %2, waited %3, entered in %4, left in %5',
              verdictName(verdict, trans),
              duration(report.held_s),
              duration(report.wait_s),
              duration(report.enter_s),
              duration(report.exit_s)
            )}
          </title>
          <rect
            className="jp-krex-span-cost"
            x={cssShare(span.from - span.enter)}
            y={BAR_TOP}
            width={cssShare(span.enter)}
            height={BAR_HEIGHT}
          />
          <rect
            className="jp-krex-span-cost"
            x={cssShare(span.to)}
            y={BAR_TOP}
            width={cssShare(span.exit)}
            height={BAR_HEIGHT}
          />
          <VerdictShape
            verdict={verdict}
            x={place.x}
            width={wideEnough.width}
          />
        </g>
      );
    }
  }
}

function summaryOf(row: IRow, trans: TranslationBundle): string {
  const regions = row.spans.filter(
    (one): one is Extract<Span, { kind: 'region' }> => one.kind === 'region'
  );
  const clean = regions.filter(one => one.verdict === 'clean').length;
  const pauses = row.spans.filter(one => one.kind === 'paused').length;
  return trans.__(
    '%1: %2 regions, %3 of them clean; paused %4 times',
    row.name,
    regions.length,
    clean,
    pauses
  );
}

function keyOf(span: Span, index: number): string {
  return span.kind === 'region'
    ? span.report.region_id
    : `${span.kind}${index}`;
}
