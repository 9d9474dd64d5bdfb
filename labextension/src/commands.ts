/**
 * What a user can do, by click, palette or shortcut. Each command says what went wrong and what to do about it.
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Clipboard, Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { DisposableSet, IDisposable } from '@lumino/disposable';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

import { RequestFailed } from './connection';
import { standingOf } from './standing';
import type { IKrex } from './tokens';

export const CommandIDs = {
  open: 'krex:open',
  end: 'krex:end-region',
  copyReport: 'krex:copy-report',
  openNotebook: 'krex:open-notebook',
  reconnect: 'krex:reconnect'
} as const;

export const PALETTE = [
  CommandIDs.open,
  CommandIDs.end,
  CommandIDs.copyReport,
  CommandIDs.reconnect
];

const NOTICE_MS = 3000;

/** Adds the commands; disposing the result takes them away. */
export function addCommands(options: {
  app: JupyterFrontEnd;
  krex: IKrex;
  trans: TranslationBundle;
  /** The kernel of the notebook that is looked at; null where there is none. */
  currentKernel: () => string | null;
  /** Brings the panel to the front. */
  showPanel: () => void;
}): IDisposable {
  const { app, krex, trans, currentKernel } = options;
  const { model, connection } = krex;
  const added = new DisposableSet();

  const currentRegion = (): string => {
    const standing = standingOf(model, currentKernel());
    return standing.kind === 'queued' || standing.kind === 'exclusive'
      ? standing.regionId
      : '';
  };
  const lastReport = (): string => {
    const kernel = currentKernel();
    const pid = model.status?.participants.find(
      one => kernel !== null && one.kernel_id === kernel
    )?.pid;
    return model.reports.find(one => one.pid === pid)?.region_id ?? '';
  };

  added.add(
    app.commands.addCommand(CommandIDs.open, {
      label: trans.__('KREX: Show the Panel'),
      caption: trans.__('Who holds the device, who waits, and what was clean'),
      execute: () => options.showPanel()
    })
  );
  added.add(
    app.commands.addCommand(CommandIDs.end, {
      label: trans.__('KREX: Leave the Queue or End the Region'),
      caption: trans.__(
        'Of the current notebook; the code itself runs on or gets an error'
      ),
      isEnabled: args =>
        textOf(args, 'region_id') !== '' || currentRegion() !== '',
      execute: args =>
        tell(trans, async () => {
          const region = textOf(args, 'region_id') || currentRegion();
          await connection.end(region);
          return trans.__('Region %1 was ended.', region);
        })
    })
  );
  added.add(
    app.commands.addCommand(CommandIDs.copyReport, {
      label: trans.__('KREX: Copy the Report of the Last Region'),
      caption: trans.__('Of the current notebook, as JSON'),
      isEnabled: args =>
        textOf(args, 'region_id') !== '' || lastReport() !== '',
      execute: args =>
        tell(trans, async () => {
          const region = textOf(args, 'region_id') || lastReport();
          const report = await connection.report(region);
          Clipboard.copyToSystem(JSON.stringify(report, null, 2));
          return trans.__('The report of region %1 was copied.', region);
        })
    })
  );
  added.add(
    app.commands.addCommand(CommandIDs.openNotebook, {
      label: trans.__('KREX: Open the Notebook of an Entry'),
      isEnabled: args => textOf(args, 'path') !== '',
      execute: args =>
        app.commands.execute('docmanager:open', { path: textOf(args, 'path') })
    })
  );
  added.add(
    app.commands.addCommand(CommandIDs.reconnect, {
      label: trans.__('KREX: Connect Again'),
      execute: () => model.connect()
    })
  );
  return added;
}

/** Does something and tells the user how it went. */
async function tell(
  trans: TranslationBundle,
  act: () => Promise<string>
): Promise<void> {
  try {
    Notification.success(await act(), { autoClose: NOTICE_MS });
  } catch (error) {
    if (!(error instanceof RequestFailed)) {
      throw error;
    }
    Notification.error(trans.__('KREX: %1 %2', error.message, error.whatToDo), {
      autoClose: false
    });
  }
}

function textOf(args: ReadonlyPartialJSONObject, name: string): string {
  const value = args[name];
  return typeof value === 'string' ? value : '';
}
