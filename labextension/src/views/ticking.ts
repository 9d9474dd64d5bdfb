/**
 * A widget that redraws when the model changes, and by itself only while something moves and somebody looks.
 */

import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';

import type { KrexModel } from '../model';

/** Often enough for tenths of a second to look alive, seldom enough to cost nothing. */
const TICK_MS = 200;

export abstract class TickingWidget extends ReactWidget {
  constructor(protected readonly model: KrexModel) {
    super();
    model.changed.connect(this.onChanged, this);
  }

  dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this.stop();
    this.model.changed.disconnect(this.onChanged, this);
    super.dispose();
  }

  /** Whether the passing of time alone changes what is shown. */
  protected abstract moves(): boolean;

  protected onChanged(): void {
    if (this.isVisible) {
      this.update();
    }
    this.adjust();
  }

  protected onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.update();
    this.adjust();
  }

  protected onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.adjust();
  }

  protected onBeforeHide(message: Message): void {
    super.onBeforeHide(message);
    this.stop();
  }

  protected onBeforeDetach(message: Message): void {
    this.stop();
    super.onBeforeDetach(message);
  }

  private adjust(): void {
    if (!this.isVisible || !this.moves()) {
      this.stop();
    } else if (this._timer === null) {
      this._timer = window.setInterval(() => {
        this.update();
        this.adjust();
      }, TICK_MS);
    }
  }

  private stop(): void {
    if (this._timer !== null) {
      window.clearInterval(this._timer);
      this._timer = null;
    }
  }

  private _timer: number | null = null;
}
