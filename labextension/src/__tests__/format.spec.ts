import {
  bytes,
  circled,
  cssShare,
  duration,
  running,
  shortened
} from '../format';

describe('duration', () => {
  it.each([
    [-1, '0 ms'],
    [0, '0 ms'],
    [0.00012, '0.1 ms'],
    [0.0023, '2.3 ms'],
    [0.0996, '0.10 s'],
    [0.042, '42 ms'],
    [0.42, '0.42 s'],
    [0.996, '1.0 s'],
    [1.23, '1.2 s'],
    [9.96, '10 s'],
    [59.4, '59 s'],
    [59.6, '1 min 00 s'],
    [65, '1 min 05 s'],
    [3599.7, '1 h 00 min'],
    [7380, '2 h 03 min']
  ])('%d s is %s', (value_s, text) => {
    expect(duration(value_s)).toBe(text);
  });
});

describe('running', () => {
  it('has tenths, until minutes begin', () => {
    expect(running(0)).toBe('0.0 s');
    expect(running(-3)).toBe('0.0 s');
    expect(running(0.44)).toBe('0.4 s');
    expect(running(59.94)).toBe('59.9 s');
    expect(running(61)).toBe('1 min 01 s');
  });
});

describe('bytes', () => {
  it.each([
    [0, '0 B'],
    [999, '999 B'],
    [8_700_000_000, '8.7 GB'],
    [141_000_000_000, '141 GB'],
    [999_700_000, '1 GB'],
    [2_000_000_000_000_000, '2000 TB']
  ])('%d is %s', (value_bytes, text) => {
    expect(bytes(value_bytes)).toBe(text);
  });
});

describe('the rest', () => {
  it('circles numbers as far as there are such characters', () => {
    expect([circled(1), circled(20), circled(21), circled(0)]).toEqual([
      '①',
      '⑳',
      '(21)',
      '(0)'
    ]);
  });

  it('writes shares as CSS takes them', () => {
    expect(cssShare(0.125)).toBe('12.5%');
    expect(cssShare(1 / 3)).toBe('33.333%');
  });

  it('cuts whole characters', () => {
    expect(shortened('tune-matmul', 18)).toBe('tune-matmul');
    expect(shortened('a🚀bcd', 3)).toBe('a🚀…');
  });
});
