/**
 * Turns JSON that nobody vouches for into values of a known shape, or into nothing.
 *
 * Fields that a check does not name are ignored, so that a newer server may say more.
 */

/** Tells whether a value has the shape of `T`. */
export type Check<T> = (value: unknown) => value is T;

export const text: Check<string> = (value): value is string =>
  typeof value === 'string';

export const number: Check<number> = (value): value is number =>
  typeof value === 'number';

export const truth: Check<boolean> = (value): value is boolean =>
  typeof value === 'boolean';

export function literal<T extends string>(
  ...allowed: ReadonlyArray<T>
): Check<T> {
  return (value): value is T => allowed.some(one => one === value);
}

export function nullable<T>(inner: Check<T>): Check<T | null> {
  return (value): value is T | null => value === null || inner(value);
}

export function list<T>(inner: Check<T>): Check<ReadonlyArray<T>> {
  return (value): value is ReadonlyArray<T> =>
    Array.isArray(value) && value.every(one => inner(one));
}

export function pair<A, B>(
  first: Check<A>,
  second: Check<B>
): Check<readonly [A, B]> {
  return (value): value is readonly [A, B] =>
    Array.isArray(value) &&
    value.length === 2 &&
    first(value[0]) &&
    second(value[1]);
}

export function record<T>(inner: Check<T>): Check<Readonly<Record<string, T>>> {
  return (value): value is Readonly<Record<string, T>> =>
    isRecord(value) && Object.values(value).every(one => inner(one));
}

export function object<T extends object>(fields: {
  [Name in keyof T]: Check<T[Name]>;
}): Check<T> {
  const checks = Object.entries<Check<unknown>>(fields);
  return (value): value is T =>
    isRecord(value) && checks.every(([name, check]) => check(value[name]));
}

export function either<T>(...checks: ReadonlyArray<Check<T>>): Check<T> {
  return (value): value is T => checks.some(check => check(value));
}

/** Parses text as JSON of a given shape; null where it is neither. */
export function parse<T>(json: string, check: Check<T>): T | null {
  let value: unknown;
  try {
    value = JSON.parse(json);
  } catch {
    return null;
  }
  return check(value) ? value : null;
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
