// Generated from krex_jupyter/protocol.py by `python -m krex_jupyter.server_ext.typescript`; do not edit.
// Units are in the names: _s seconds, _bytes, _mhz, _c. Unix times are `at` and `started_at`.

import * as check from './check';

export type EffectiveCpuPolicy = 'freeze' | 'isolate' | 'share';

export const checkEffectiveCpuPolicy: check.Check<EffectiveCpuPolicy> = check.literal('freeze', 'isolate', 'share');

export type Gate = 'driver-lock' | 'quiesce' | 'freeze' | 'observe';

export const checkGate: check.Check<Gate> = check.literal('driver-lock', 'quiesce', 'freeze', 'observe');

export type Vendor = 'nvidia' | 'amd' | 'cpu';

export const checkVendor: check.Check<Vendor> = check.literal('nvidia', 'amd', 'cpu');

export type Verdict = 'clean' | 'suspect' | 'contended' | 'revoked' | 'unknown';

export const checkVerdict: check.Check<Verdict> = check.literal('clean', 'suspect', 'contended', 'revoked', 'unknown');

/** A device of this host. `index` is the driver's, None for the cpu; `uuid` is its identity everywhere. */
export interface IDeviceInfo {
  uuid: string;
  name: string;
  vendor: Vendor;
  index: number | null;
  memory_bytes: number | null;
  gates: ReadonlyArray<Gate>;
  note: string;
}

export const checkDeviceInfo: check.Check<IDeviceInfo> = check.object<IDeviceInfo>({
  uuid: check.text,
  name: check.text,
  vendor: checkVendor,
  index: check.nullable(check.number),
  memory_bytes: check.nullable(check.number),
  gates: check.list(checkGate),
  note: check.text
});

/** A held region. */
export interface IHolderStatus {
  region_id: string;
  epoch: number;
  pid: number;
  uid: number;
  label: string;
  notebook: string;
  devices: ReadonlyArray<string>;
  cpu_policy: EffectiveCpuPolicy;
  phase: 'entering' | 'held' | 'leaving';
  held_s: number;
  remaining_s: number | null;
  siblings_gated: number;
  siblings_observed: number;
  notice: string;
}

export const checkHolderStatus: check.Check<IHolderStatus> = check.object<IHolderStatus>({
  region_id: check.text,
  epoch: check.number,
  pid: check.number,
  uid: check.number,
  label: check.text,
  notebook: check.text,
  devices: check.list(check.text),
  cpu_policy: checkEffectiveCpuPolicy,
  phase: check.literal('entering', 'held', 'leaving'),
  held_s: check.number,
  remaining_s: check.nullable(check.number),
  siblings_gated: check.number,
  siblings_observed: check.number,
  notice: check.text
});

/** A queued request. */
export interface IWaiterStatus {
  pid: number;
  uid: number;
  label: string;
  notebook: string;
  devices: ReadonlyArray<string>;
  position: number;
  waited_s: number;
  eta_s: number | null;
  waits_for: string;
  region_id: string;
}

export const checkWaiterStatus: check.Check<IWaiterStatus> = check.object<IWaiterStatus>({
  pid: check.number,
  uid: check.number,
  label: check.text,
  notebook: check.text,
  devices: check.list(check.text),
  position: check.number,
  waited_s: check.number,
  eta_s: check.nullable(check.number),
  waits_for: check.text,
  region_id: check.text
});

/** A device with its holder and queue. */
export interface IDeviceStatus {
  device: IDeviceInfo;
  holder: IHolderStatus | null;
  queue: ReadonlyArray<IWaiterStatus>;
}

export const checkDeviceStatus: check.Check<IDeviceStatus> = check.object<IDeviceStatus>({
  device: checkDeviceInfo,
  holder: check.nullable(checkHolderStatus),
  queue: check.list(checkWaiterStatus)
});

/** A process that the coordinator knows. */
export interface IParticipantStatus {
  pid: number;
  uid: number;
  label: string;
  kernel_id: string;
  notebook: string;
  joined: boolean;
  gpu_library: boolean | null;
  state: 'running' | 'queued' | 'holding' | 'paused';
  paused_by: string;
  paused_s: number;
  protected: boolean;
}

export const checkParticipantStatus: check.Check<IParticipantStatus> = check.object<IParticipantStatus>({
  pid: check.number,
  uid: check.number,
  label: check.text,
  kernel_id: check.text,
  notebook: check.text,
  joined: check.truth,
  gpu_library: check.nullable(check.truth),
  state: check.literal('running', 'queued', 'holding', 'paused'),
  paused_by: check.text,
  paused_s: check.number,
  protected: check.truth
});

/** The device of a report. */
export interface IReportDevice {
  id: string;
  uuid: string;
  name: string;
  vendor: Vendor;
}

export const checkReportDevice: check.Check<IReportDevice> = check.object<IReportDevice>({
  id: check.text,
  uuid: check.text,
  name: check.text,
  vendor: checkVendor
});

/** Where the time of an entry went, as far as the guardian spent it. */
export interface IEntryCosts {
  lock_s: number;
  freeze_s: number;
  verify_s: number;
}

export const checkEntryCosts: check.Check<IEntryCosts> = check.object<IEntryCosts>({
  lock_s: check.number,
  freeze_s: check.number,
  verify_s: check.number
});

/** What was done to one sibling process for one region. */
export interface ISiblingReport {
  pid: number;
  label: string;
  gate: Gate;
  frozen: boolean;
  drain_s: number | null;
  error: string;
}

export const checkSiblingReport: check.Check<ISiblingReport> = check.object<ISiblingReport>({
  pid: check.number,
  label: check.text,
  gate: checkGate,
  frozen: check.truth,
  drain_s: check.nullable(check.number),
  error: check.text
});

/** Why a verdict is not `clean`: a stable `code` and a sentence that says what to do. */
export interface IReason {
  code: string;
  detail: string;
}

export const checkReason: check.Check<IReason> = check.object<IReason>({
  code: check.text,
  detail: check.text
});

/** What the owner's process read of itself around its region. None is "could not be read", never zero. */
export interface IOwnerEvidence {
  run_queue_delay_s: number | null;
  cpu_time_s: number | null;
  wall_s: number | null;
  involuntary_switches: number | null;
  major_faults: number | null;
  migrations_off_reserved: number | null;
  other_cpu_s: number | null;
  steal_s: number | null;
  synchronised: boolean | null;
  sync_error: string;
  other_contexts: boolean | null;
  pin_error: string;
  thread_pool_created: boolean;
  interrupted: boolean;
}

export const checkOwnerEvidence: check.Check<IOwnerEvidence> = check.object<IOwnerEvidence>({
  run_queue_delay_s: check.nullable(check.number),
  cpu_time_s: check.nullable(check.number),
  wall_s: check.nullable(check.number),
  involuntary_switches: check.nullable(check.number),
  major_faults: check.nullable(check.number),
  migrations_off_reserved: check.nullable(check.number),
  other_cpu_s: check.nullable(check.number),
  steal_s: check.nullable(check.number),
  synchronised: check.nullable(check.truth),
  sync_error: check.text,
  other_contexts: check.nullable(check.truth),
  pin_error: check.text,
  thread_pool_created: check.truth,
  interrupted: check.truth
});

/** What the guardian saw of the siblings while all was still gated. */
export interface IGuardianAudit {
  frozen_threads: number;
  ran: ReadonlyArray<readonly [number, number]>;
  unreadable: ReadonlyArray<number>;
  unlocked: ReadonlyArray<number>;
  observed_cpu_s: Readonly<Record<string, number>>;
  released_for_signal: ReadonlyArray<number>;
  joined_late: ReadonlyArray<ISiblingReport>;
}

export const checkGuardianAudit: check.Check<IGuardianAudit> = check.object<IGuardianAudit>({
  frozen_threads: check.number,
  ran: check.list(check.pair(check.number, check.number)),
  unreadable: check.list(check.number),
  unlocked: check.list(check.number),
  observed_cpu_s: check.record(check.number),
  released_for_signal: check.list(check.number),
  joined_late: check.list(checkSiblingReport)
});

/** Process lists of the device at both ends. None: could not be read. */
export interface IDeviceEvidence {
  processes_before: ReadonlyArray<number> | null;
  processes_after: ReadonlyArray<number> | null;
  ungated: ReadonlyArray<number>;
  error: string;
}

export const checkDeviceEvidence: check.Check<IDeviceEvidence> = check.object<IDeviceEvidence>({
  processes_before: check.nullable(check.list(check.number)),
  processes_after: check.nullable(check.list(check.number)),
  ungated: check.list(check.number),
  error: check.text
});

/** Everything that a verdict rests on. */
export interface IEvidence {
  owner: IOwnerEvidence | null;
  siblings: IGuardianAudit | null;
  device: Readonly<Record<string, IDeviceEvidence>>;
}

export const checkEvidence: check.Check<IEvidence> = check.object<IEvidence>({
  owner: check.nullable(checkOwnerEvidence),
  siblings: check.nullable(checkGuardianAudit),
  device: check.record(checkDeviceEvidence)
});

/** One region: what was done, what was seen, and what that makes of its numbers. */
export interface IRegionReport {
  version: number;
  region_id: string;
  epoch: number;
  device: IReportDevice;
  devices: ReadonlyArray<IReportDevice>;
  label: string;
  pid: number;
  notebook: string;
  uid: number;
  started_at: number;
  wait_s: number;
  enter_s: number;
  held_s: number;
  exit_s: number;
  enter_costs: IEntryCosts;
  cpu_policy: EffectiveCpuPolicy;
  siblings: ReadonlyArray<ISiblingReport>;
  verdict: Verdict;
  reasons: ReadonlyArray<IReason>;
  evidence: IEvidence;
}

export const checkRegionReport: check.Check<IRegionReport> = check.object<IRegionReport>({
  version: check.number,
  region_id: check.text,
  epoch: check.number,
  device: checkReportDevice,
  devices: check.list(checkReportDevice),
  label: check.text,
  pid: check.number,
  notebook: check.text,
  uid: check.number,
  started_at: check.number,
  wait_s: check.number,
  enter_s: check.number,
  held_s: check.number,
  exit_s: check.number,
  enter_costs: checkEntryCosts,
  cpu_policy: checkEffectiveCpuPolicy,
  siblings: check.list(checkSiblingReport),
  verdict: checkVerdict,
  reasons: check.list(checkReason),
  evidence: checkEvidence
});

/** Snapshot of a host: the answer to `GetStatus`, and the first event of a subscription. */
export interface IStatus {
  type: 'status';
  request_id: number;
  version: number;
  coordinator_pid: number;
  guardian_pid: number | null;
  system: boolean;
  socket: string;
  uptime_s: number;
  devices: ReadonlyArray<IDeviceStatus>;
  participants: ReadonlyArray<IParticipantStatus>;
  recent: ReadonlyArray<IRegionReport>;
  notices: ReadonlyArray<string>;
}

export const checkStatus: check.Check<IStatus> = check.object<IStatus>({
  type: check.literal('status'),
  request_id: check.number,
  version: check.number,
  coordinator_pid: check.number,
  guardian_pid: check.nullable(check.number),
  system: check.truth,
  socket: check.text,
  uptime_s: check.number,
  devices: check.list(checkDeviceStatus),
  participants: check.list(checkParticipantStatus),
  recent: check.list(checkRegionReport),
  notices: check.list(check.text)
});

/** Something changed. `status` events carry a fresh snapshot; the others say what happened. */
export interface IEvent {
  type: 'event';
  kind: 'queued' | 'granted' | 'released' | 'revoked' | 'left' | 'registered' | 'gone' | 'notice' | 'status';
  at: number;
  region_id: string;
  pid: number;
  label: string;
  notebook: string;
  devices: ReadonlyArray<string>;
  detail: string;
  report: IRegionReport | null;
  status: IStatus | null;
}

export const checkEvent: check.Check<IEvent> = check.object<IEvent>({
  type: check.literal('event'),
  kind: check.literal('queued', 'granted', 'released', 'revoked', 'left', 'registered', 'gone', 'notice', 'status'),
  at: check.number,
  region_id: check.text,
  pid: check.number,
  label: check.text,
  notebook: check.text,
  devices: check.list(check.text),
  detail: check.text,
  report: check.nullable(checkRegionReport),
  status: check.nullable(checkStatus)
});

/**
 * Nobody coordinates this host now; what was shown before is stale. A `Status` follows once that
 * changes.
 */
export interface IUnavailable {
  type: 'unavailable';
  at: number;
  detail: string;
}

export const checkUnavailable: check.Check<IUnavailable> = check.object<IUnavailable>({
  type: check.literal('unavailable'),
  at: check.number,
  detail: check.text
});

/** Reports, newest first. */
export interface IHistory {
  type: 'history';
  request_id: number;
  reports: ReadonlyArray<IRegionReport>;
}

export const checkHistory: check.Check<IHistory> = check.object<IHistory>({
  type: check.literal('history'),
  request_id: check.number,
  reports: check.list(checkRegionReport)
});

/** Body of every REST answer that is an error. */
export interface IErrorBody {
  message: string;
  what_to_do: string;
  code: string;
}

export const checkErrorBody: check.Check<IErrorBody> = check.object<IErrorBody>({
  message: check.text,
  what_to_do: check.text,
  code: check.text
});

/** What the event socket carries. */
export type ToBrowser = IStatus | IEvent | IUnavailable;

export const checkToBrowser: check.Check<ToBrowser> = check.either<ToBrowser>(checkStatus, checkEvent, checkUnavailable);
