module.exports = {
  testEnvironment: 'node',
  roots: ['<rootDir>/src'],
  testRegex: 'src/__tests__/.*\\.spec\\.ts$',
  transform: {
    '^.+\\.tsx?$': [
      'ts-jest',
      {
        tsconfig: {
          // Types are checked by lint:check; here only behaviour is.
          isolatedModules: true,
          module: 'commonjs',
          moduleResolution: 'node',
          target: 'ES2020',
          strict: true,
          esModuleInterop: true,
          resolveJsonModule: true,
          skipLibCheck: true,
          types: ['jest']
        }
      }
    ]
  }
};
