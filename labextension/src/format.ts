/**
 * Numbers as people read them. The only place that converts units; pure.
 */

/** A duration: `0.42 s`, `12 s`, `1 min 05 s`, `2 h 03 min`. */
export function duration(value_s: number): string {
  const s = Math.max(0, value_s);
  if (s < 0.0995) {
    return s < 0.01
      ? `${trimmed(s * 1000, 1)} ms`
      : `${Math.round(s * 1000)} ms`;
  }
  if (s < 9.95) {
    return `${s.toFixed(s < 0.995 ? 2 : 1)} s`;
  }
  if (s < 59.5) {
    return `${Math.round(s)} s`;
  }
  const whole = Math.round(s);
  if (whole < 3600) {
    return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  }
  const minutes = Math.floor(whole / 60);
  return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

/** A duration that runs on the screen: tenths only, so that digits do not flicker. */
export function running(value_s: number): string {
  const s = Math.max(0, value_s);
  return s < 59.95 ? `${s.toFixed(1)} s` : duration(s);
}

/** A size in powers of ten, as vendors count memory: `141 GB`. */
export function bytes(value_bytes: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let value = value_bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 9.95 && unit > 0 ? trimmed(value, 1) : Math.round(value)} ${units[unit]}`;
}

/** A share as CSS takes it: `12.5%`. */
export function cssShare(share: number): string {
  return `${trimmed(share * 100, 3)}%`;
}

/** A number in a circle, up to 20; else in parentheses. */
export function circled(position: number): string {
  return position >= 1 && position <= 20
    ? String.fromCodePoint(0x245f + position)
    : `(${position})`;
}

/** Text of at most some characters; the last is an ellipsis where it is cut. */
export function shortened(text: string, most: number): string {
  const characters = [...text];
  return characters.length <= most
    ? text
    : `${characters.slice(0, most - 1).join('')}…`;
}

function trimmed(value: number, digits: number): string {
  return String(Number(value.toFixed(digits)));
}

function two(value: number): string {
  return String(value).padStart(2, '0');
}
