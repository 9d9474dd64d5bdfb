/**
 * Where one kernel stands, and who is who: pure readings of a snapshot.
 */

import type { KrexModel } from './model';
import type {
  IHolderStatus,
  IParticipantStatus,
  IStatus,
  IWaiterStatus
} from './protocol';

/** What a notebook's indicator shows. */
export type Standing =
  | { readonly kind: 'idle' }
  | {
      readonly kind: 'queued';
      readonly position: number;
      readonly eta_s: number | null;
      readonly waitsFor: string;
      readonly regionId: string;
    }
  | {
      readonly kind: 'exclusive';
      readonly phase: IHolderStatus['phase'];
      readonly held_s: number;
      readonly remaining_s: number | null;
      readonly regionId: string;
    }
  | { readonly kind: 'paused'; readonly by: string; readonly paused_s: number }
  | { readonly kind: 'connecting' }
  | { readonly kind: 'no-coordinator' }
  | { readonly kind: 'disconnected' }
  | { readonly kind: 'no-extension' }
  | { readonly kind: 'no-permission' }
  | { readonly kind: 'mismatch' };

/** Where a kernel stands; `null` is no kernel in particular, which is never paused. */
export function standingOf(
  model: KrexModel,
  kernelId: string | null
): Standing {
  const { feed, status } = model;
  if (feed.kind !== 'live') {
    return { kind: feed.kind };
  }
  const participant =
    kernelId === null
      ? undefined
      : status?.participants.find(one => one.kernel_id === kernelId);
  if (status === null || participant === undefined) {
    return { kind: 'idle' };
  }
  // A holder or waiter that stands frozen meanwhile is first of all a holder or waiter.
  for (const { holder, queue } of status.devices) {
    if (holder !== null && holder.pid === participant.pid) {
      return {
        kind: 'exclusive',
        phase: holder.phase,
        regionId: holder.region_id,
        ...holdTimes(holder, model.age_s)
      };
    }
    const waiter = queue.find(one => one.pid === participant.pid);
    if (waiter !== undefined) {
      return {
        kind: 'queued',
        position: waiter.position,
        eta_s: etaOf(waiter, model.age_s),
        waitsFor: waiter.waits_for,
        regionId: waiter.region_id
      };
    }
  }
  if (participant.state === 'paused') {
    const by = holders(status).find(
      one => one.region_id === participant.paused_by
    );
    return {
      kind: 'paused',
      by: by === undefined ? '' : shortName(by),
      paused_s: Math.max(0, participant.paused_s) + model.age_s
    };
  }
  return { kind: 'idle' };
}

/** Seconds held and left, `age_s` after the snapshot. */
export function holdTimes(
  holder: IHolderStatus,
  age_s: number
): { held_s: number; remaining_s: number | null } {
  if (holder.phase === 'entering') {
    // Its lease has not begun.
    return { held_s: holder.held_s, remaining_s: holder.remaining_s };
  }
  return {
    held_s: holder.held_s + age_s,
    remaining_s:
      holder.remaining_s === null
        ? null
        : Math.max(0, holder.remaining_s - age_s)
  };
}

/** Estimated seconds to wait, `age_s` after the snapshot; null: there is nothing to estimate from. */
export function etaOf(waiter: IWaiterStatus, age_s: number): number | null {
  return waiter.eta_s === null ? null : Math.max(0, waiter.eta_s - age_s);
}

/** Every held region once, also where it holds several devices. */
export function holders(status: IStatus): IHolderStatus[] {
  const found = new Map<string, IHolderStatus>();
  for (const { holder } of status.devices) {
    if (holder !== null) {
      found.set(holder.region_id, holder);
    }
  }
  return [...found.values()];
}

/** What people call a process: its notebook's name, else its label, else its pid. */
export function nameOf(who: {
  notebook: string;
  label: string;
  pid: number;
}): string {
  return who.notebook.split('/').pop() || who.label || `pid ${who.pid}`;
}

/** The same without the ending of a notebook. */
export function shortName(who: {
  notebook: string;
  label: string;
  pid: number;
}): string {
  return nameOf(who).replace(/\.ipynb$/, '');
}

/** The label of a region where it says more than the name does. */
export function labelBeside(who: {
  notebook: string;
  label: string;
  pid: number;
}): string {
  return who.label === nameOf(who) || who.label === shortName(who)
    ? ''
    : who.label;
}

/** Processes of this server's kernels. */
export function ownParticipants(model: KrexModel): IParticipantStatus[] {
  return (model.status?.participants ?? []).filter(one =>
    model.ownKernels.has(one.kernel_id)
  );
}

/** Whether a process is a kernel of this server. */
export function isOwn(model: KrexModel, pid: number): boolean {
  return ownParticipants(model).some(one => one.pid === pid);
}

/** Whether the coordinator would let this user end a region: it decides by uid. */
export function mayEnd(
  model: KrexModel,
  region: { pid: number; uid: number }
): boolean {
  if (model.stale || model.status === null) {
    return false;
  }
  // A coordinator that is not the system's serves one user only.
  return (
    !model.status.system ||
    ownParticipants(model).some(one => one.uid === region.uid)
  );
}

/** The path under which this server knows the notebook of a process; empty where it does not. */
export function notebookToOpen(model: KrexModel, pid: number): string {
  const found = ownParticipants(model).find(one => one.pid === pid);
  const path = found?.notebook ?? '';
  return path.startsWith('/') ? '' : path;
}

/** Whether something on the screen changes by the passing of time alone. */
export function isMoving(model: KrexModel, window_s: number): boolean {
  const { status } = model;
  if ('retry_s' in model.feed) {
    return true;
  }
  if (model.stale || status === null) {
    return false;
  }
  const last = model.reports[0];
  return (
    status.devices.some(one => one.holder !== null || one.queue.length > 0) ||
    (last !== undefined &&
      last.started_at + last.held_s + last.exit_s >
        model.hostNow_s - window_s - 1)
  );
}
