/**
 * A widget that redraws when the model changes, and by itself only while something moves and somebody looks.
 * However fast changes come, it draws at a bounded pace, and never leaves out the last one.
 */

import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';

import type { KrexModel } from '../model';

/** Often enough for tenths of a second to look alive, seldom enough to cost nothing. */
const TICK_MS = 200;
/** Changes that come faster are drawn together. */
const LEAST_BETWEEN_MS = 80;

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
    this.forget();
    this.model.changed.disconnect(this.onChanged, this);
    super.dispose();
  }

  /** Whether the passing of time alone changes what is shown. */
  protected abstract moves(): boolean;

  protected onChanged(): void {
    if (this.isVisible) {
      this.updateSoon();
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

  protected onUpdateRequest(message: Message): void {
    this._drawn_ms = performance.now();
    super.onUpdateRequest(message);
  }

  /** At once, or together with what else changes until the next drawing is due. */
  private updateSoon(): void {
    const due_ms = this._drawn_ms + LEAST_BETWEEN_MS - performance.now();
    if (due_ms <= 0) {
      this.update();
    } else if (this._soon === null) {
      this._soon = window.setTimeout(() => {
        this._soon = null;
        this.update();
      }, due_ms);
    }
  }

  private forget(): void {
    if (this._soon !== null) {
      window.clearTimeout(this._soon);
      this._soon = null;
    }
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
  private _soon: number | null = null;
  private _drawn_ms = Number.NEGATIVE_INFINITY;
}
