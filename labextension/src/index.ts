/**
 * Wires the plugins, and nothing else. All work in JupyterLab 4 and in Notebook 7; what only one of them has is
 * optional, and the plugin that needs it does nothing elsewhere.
 */

import {
  ILabShell,
  ILayoutRestorer,
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { addCommands, CommandIDs, PALETTE } from './commands';
import { browserClock, Connection, followNetwork } from './connection';
import { krexIcon } from './icon';
import { KrexModel } from './model';
import { IKrex } from './tokens';
import { IndicatorWidget } from './views/indicator';
import { PanelWidget } from './views/panel';

const DOMAIN = 'krex_jupyter';
const PANEL_ID = 'krex-jupyter:panel';

const model: JupyterFrontEndPlugin<IKrex> = {
  id: 'krex-jupyter:model',
  description: 'What this page knows of the coordinator.',
  autoStart: true,
  provides: IKrex,
  activate: (app: JupyterFrontEnd): IKrex => {
    const { serverSettings, kernels } = app.serviceManager;
    const connection = new Connection(serverSettings);
    const krex = {
      connection,
      model: new KrexModel({ transport: connection, clock: browserClock })
    };
    const takeKernels = (): void => {
      krex.model.ownKernels = new Set(
        [...kernels.running()].map(one => one.id)
      );
    };
    kernels.runningChanged.connect(takeKernels);
    const following = followNetwork(krex.model);
    krex.model.disposed.connect(() => {
      following.dispose();
      kernels.runningChanged.disconnect(takeKernels);
    });
    takeKernels();
    krex.model.connect();
    return krex;
  }
};

const panel: JupyterFrontEndPlugin<void> = {
  id: PANEL_ID,
  description: 'The side panel and the commands.',
  autoStart: true,
  requires: [IKrex],
  optional: [
    ICommandPalette,
    ILayoutRestorer,
    INotebookTracker,
    ISettingRegistry,
    ITranslator
  ],
  activate: (
    app: JupyterFrontEnd,
    krex: IKrex,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    notebooks: INotebookTracker | null,
    settings: ISettingRegistry | null,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const widget = new PanelWidget({
      model: krex.model,
      commands: app.commands,
      trans,
      icon: krexIcon
    });
    app.shell.add(widget, 'right', { rank: 900 });
    restorer?.add(widget, widget.id);
    const added = addCommands({
      app,
      krex,
      trans,
      currentKernel: () => kernelOf(notebooks?.currentWidget ?? null),
      showPanel: () => app.shell.activateById(widget.id)
    });
    widget.disposed.connect(() => added.dispose());
    for (const command of PALETTE) {
      palette?.addItem({ command, category: trans.__('KREX') });
    }
    void settings?.load(PANEL_ID).then(loaded => {
      const take = (): void => {
        const value = loaded.get('timelineSeconds').composite;
        widget.window_s = typeof value === 'number' ? value : 30;
      };
      loaded.changed.connect(take);
      widget.disposed.connect(() => loaded.changed.disconnect(take));
      take();
    });
  }
};

const toolbar: JupyterFrontEndPlugin<void> = {
  id: 'krex-jupyter:toolbar',
  description: 'The state of a notebook in its toolbar.',
  autoStart: true,
  requires: [IKrex, IToolbarWidgetRegistry],
  optional: [ITranslator],
  activate: (
    app: JupyterFrontEnd,
    krex: IKrex,
    registry: IToolbarWidgetRegistry,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    registry.addFactory<NotebookPanel>('Notebook', 'krex', notebook => {
      const widget = new IndicatorWidget({
        model: krex.model,
        trans,
        kernelId: () => kernelOf(notebook),
        onClick: () => void app.commands.execute(CommandIDs.open),
        speaks: true
      });
      const update = (): void => widget.update();
      notebook.sessionContext.kernelChanged.connect(update);
      widget.disposed.connect(() => {
        notebook.sessionContext.kernelChanged.disconnect(update);
      });
      return widget;
    });
  }
};

const statusBar: JupyterFrontEndPlugin<void> = {
  id: 'krex-jupyter:status-bar',
  description: 'The state of the current notebook in the status bar.',
  autoStart: true,
  requires: [IKrex],
  optional: [IStatusBar, ILabShell, INotebookTracker, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    krex: IKrex,
    bar: IStatusBar | null,
    shell: ILabShell | null,
    notebooks: INotebookTracker | null,
    translator: ITranslator | null
  ): void => {
    if (bar === null || shell === null) {
      return;
    }
    const widget = new IndicatorWidget({
      model: krex.model,
      trans: (translator ?? nullTranslator).load(DOMAIN),
      kernelId: () => kernelOf(notebooks?.currentWidget ?? null),
      onClick: () => void app.commands.execute(CommandIDs.open),
      speaks: false
    });
    const update = (): void => widget.update();
    shell.currentChanged.connect(update);
    widget.disposed.connect(() => {
      shell.currentChanged.disconnect(update);
    });
    bar.registerStatusItem('krex-jupyter:status-bar', {
      item: widget,
      align: 'left',
      rank: 50
    });
  }
};

function kernelOf(notebook: NotebookPanel | null): string | null {
  return notebook?.sessionContext.session?.kernel?.id ?? null;
}

export default [model, panel, toolbar, statusBar];
