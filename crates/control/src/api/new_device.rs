//! A device that is added while the daemon runs: what may be said of it, and what that means.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sidecore_assembly::spec::{
    DeviceSpec, FrontEndKind, IdleMode, Interrupts, LimitSpec, LimitsSpec, Nanos, QUEUES_MAX, SERIAL_MAX_BYTES,
    SocketAccess, StoreKind, StoreSpec, VolumeSpec,
};

use crate::config::DEFAULT_SPIN_US;
use crate::config::rules;

/// A device to add: `POST /v1/devices`. What is left out is as in the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NewDevice {
    /// Its name.
    pub name: String,
    /// The vhost-user socket to serve it on, an absolute path.
    pub socket: PathBuf,
    /// The socket's user, by name or number; the daemon's if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_owner: Option<String>,
    /// The socket's group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_group: Option<String>,
    /// The socket's permissions in octal digits, for instance `0660`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_mode: Option<String>,
    /// What its guest sees: `virtio-blk` or `nvme`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub front_end: Option<String>,
    /// A store of the configuration; or else `volume`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// A virtual function to make for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<NewFunction>,
    /// How many request queues it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// The largest ring that it accepts, in entries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_size_max: Option<u16>,
    /// The sidecores that serve it; none to have one chosen.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sidecores: Vec<String>,
    /// `poll`, `adaptive` or `interrupt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<String>,
    /// How long an adaptive one spins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spin_us: Option<u64>,
    /// How an NVMe function interrupts its driver: `msi-x` or `msi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interrupts: Option<String>,
    /// Whether it offers packed rings.
    pub packed: bool,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The cache mode until the driver chooses another: `false` makes each write durable before it completes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_cache: Option<bool>,
    /// Most segments in a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seg_max: Option<u32>,
    /// Most bytes in a segment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_max: Option<u32>,
    /// The serial number that the guest sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The size of an NVMe namespace's blocks in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
}

/// A virtual function of a volume that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NewFunction {
    /// The controller.
    pub controller: String,
    /// The volume.
    pub volume: String,
    /// Its share among those that want to be served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Reads a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Reads at once after a rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops_burst: Option<u64>,
    /// Writes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Writes at once after a rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops_burst: Option<u64>,
    /// Bytes read a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bps: Option<u64>,
    /// Bytes read at once after a rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bps_burst: Option<u64>,
    /// Bytes written a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bps: Option<u64>,
    /// Bytes written at once after a rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bps_burst: Option<u64>,
    /// Whether nothing may be written.
    pub read_only: bool,
}

impl NewDevice {
    /// What it means, or what is wrong with it.
    pub(super) fn settle(self) -> Result<(DeviceSpec, Option<StoreSpec>), String> {
        rules::device_name(&self.name)?;
        rules::socket(&self.socket)?;
        let front_end = self.front_end()?;
        let (store, spec) = match (self.store, self.volume) {
            (Some(store), None) => (store, None),
            (None, Some(function)) => {
                // No name of the configuration has a slash.
                let name = format!("{}/{}@{}", function.controller, function.volume, self.name);
                (name.clone(), Some(StoreSpec::new(name, StoreKind::Volume(function.settle()?))))
            }
            _ => return Err("a device has either a `store` or a `volume`".to_owned()),
        };
        let mode = self.socket_mode.as_deref().map(rules::mode).transpose();
        let mode = mode.map_err(|why| format!("`socket_mode` {why}"))?;
        let access = SocketAccess { owner: self.socket_owner, group: self.socket_group, mode };
        let queues = within("queues", self.queues.unwrap_or(front_end.queues()).into(), 1, QUEUES_MAX.into())?;
        let queue_size_max = self.queue_size_max.unwrap_or(rules::QUEUE_SIZE_DEFAULT);
        if !queue_size_max.is_power_of_two() || queue_size_max > rules::QUEUE_SIZE_LIMIT {
            return Err(format!("`queue_size_max` is a power of two up to {}", rules::QUEUE_SIZE_LIMIT));
        }
        if self.sidecores.len() > usize::try_from(queues).unwrap_or(usize::MAX) {
            return Err("a queue is served by one sidecore: there are more `sidecores` than `queues`".to_owned());
        }
        let spin_us = within("spin_us", self.spin_us.unwrap_or(DEFAULT_SPIN_US), 0, rules::MINUTE_US)?;
        let idle = match self.idle.as_deref() {
            Some("poll") => IdleMode::Poll,
            Some("interrupt") => IdleMode::Interrupt,
            Some("adaptive") | None => IdleMode::Adaptive { spin: Nanos::from_micros(spin_us) },
            Some(other) => return Err(format!("`idle` is \"poll\", \"adaptive\" or \"interrupt\", not \"{other}\"")),
        };
        let interrupts = match self.interrupts.as_deref() {
            Some(word) => Interrupts::from_word(word)
                .ok_or_else(|| format!("`interrupts` is \"msi-x\" or \"msi\", not \"{word}\""))?,
            None => Interrupts::default(),
        };
        if let Some(seg_max) = self.seg_max {
            within("seg_max", seg_max.into(), 1, rules::SEG_MAX_LIMIT.into())?;
        }
        if let Some(size_max) = self.size_max {
            within("size_max", size_max.into(), rules::SIZE_MAX_LEAST.into(), u32::MAX.into())?;
        }
        if self.serial.as_deref().is_some_and(|serial| !rules::is_serial(serial)) {
            return Err(format!("`serial` is more than {SERIAL_MAX_BYTES} bytes, or not plain ASCII"));
        }
        let device = DeviceSpec {
            name: self.name,
            front_end,
            store,
            socket: self.socket,
            access,
            queues: u16::try_from(queues).unwrap_or(1),
            queue_size_max,
            sidecores: self.sidecores,
            idle,
            interrupts,
            packed: self.packed,
            read_only: self.read_only,
            write_cache: self.write_cache.unwrap_or(true),
            seg_max: self.seg_max,
            size_max_bytes: self.size_max,
            serial: self.serial,
            block_bytes: self.block_size,
        };
        Ok((device, spec))
    }

    /// What its guest sees, if all that is said of it has a meaning then.
    fn front_end(&self) -> Result<FrontEndKind, String> {
        let kind = match self.front_end.as_deref() {
            Some(word) => FrontEndKind::from_word(word)
                .ok_or_else(|| format!("`front_end` is \"virtio-blk\" or \"nvme\", not \"{word}\""))?,
            None => FrontEndKind::default(),
        };
        let said = [
            ("queue_size_max", self.queue_size_max.is_some()),
            ("interrupts", self.interrupts.is_some()),
            ("packed", self.packed),
            ("write_cache", self.write_cache.is_some()),
            ("seg_max", self.seg_max.is_some()),
            ("size_max", self.size_max.is_some()),
            ("block_size", self.block_size.is_some()),
        ];
        for (key, is_said) in said {
            if is_said && rules::without_meaning(kind).contains(&key) {
                return Err(format!("`{key}` has no meaning with `front_end` \"{}\"; leave it out", kind.word()));
            }
        }
        if self.block_size.is_some_and(|bytes| !rules::NVME_BLOCK_BYTES.contains(&bytes)) {
            return Err("`block_size` is 512 or 4096".to_owned());
        }
        Ok(kind)
    }
}

impl NewFunction {
    fn settle(self) -> Result<VolumeSpec, String> {
        if let Some(problem) = rules::volume_name_problem(&self.volume) {
            return Err(format!("\"{}\" is no name for a volume: {problem}", self.volume));
        }
        let weight = self.weight.unwrap_or(VolumeSpec::WEIGHT);
        within("weight", weight.into(), 1, VolumeSpec::WEIGHT_MAX.into())?;
        Ok(VolumeSpec {
            weight,
            limits: LimitsSpec {
                read_iops: limit("read_iops", self.read_iops, self.read_iops_burst)?,
                write_iops: limit("write_iops", self.write_iops, self.write_iops_burst)?,
                read_bps: limit("read_bps", self.read_bps, self.read_bps_burst)?,
                write_bps: limit("write_bps", self.write_bps, self.write_bps_burst)?,
            },
            read_only: self.read_only,
            ..VolumeSpec::new(self.controller, self.volume)
        })
    }
}

fn limit(key: &str, per_s: Option<u64>, burst: Option<u64>) -> Result<Option<LimitSpec>, String> {
    match (per_s, burst) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(format!("`{key}_burst` has no meaning without `{key}`")),
        (Some(0), _) | (_, Some(0)) => Err(format!("`{key}` and `{key}_burst` are at least 1")),
        (Some(per_s), burst) => Ok(Some(LimitSpec { per_s, burst: burst.unwrap_or(per_s) })),
    }
}

fn within(key: &str, number: u64, least: u64, most: u64) -> Result<u64, String> {
    if (least..=most).contains(&number) {
        Ok(number)
    } else {
        Err(format!("`{key}` is a whole number from {least} to {most}, not {number}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> NewDevice {
        let volume = NewFunction { controller: "c".to_owned(), volume: "v".to_owned(), ..NewFunction::default() };
        NewDevice { name: "x".to_owned(), socket: "/run/x.sock".into(), volume: Some(volume), ..NewDevice::default() }
    }

    #[test]
    fn what_is_left_out_is_as_in_the_configuration() {
        let (device, store) = good().settle().unwrap();
        assert_eq!((device.queues, device.queue_size_max), (1, 1024));
        assert_eq!(device.idle, IdleMode::Adaptive { spin: Nanos::from_micros(50) });
        let store = store.unwrap();
        assert_eq!((device.store.as_str(), store.name.as_str()), ("c/v@x", "c/v@x"));
        assert_eq!(store.kind, StoreKind::Volume(VolumeSpec::new("c", "v")));
    }

    #[test]
    fn each_fault_is_named() {
        type Spoil = fn(&mut NewDevice, &mut NewFunction);
        let faults: &[(&str, Spoil)] = &[
            ("a name has 1 to 64", |device, _| device.name = "a b".to_owned()),
            ("absolute path", |device, _| device.socket = "x.sock".into()),
            ("`socket_mode` is three octal digits", |device, _| device.socket_mode = Some("rw".to_owned())),
            ("holds 107 bytes", |device, _| device.socket = format!("/{}", "a".repeat(107)).into()),
            ("either a `store` or a `volume`", |device, _| device.store = Some("mem".to_owned())),
            ("`queues` is a whole number from 1 to 64", |device, _| device.queues = Some(0)),
            ("power of two", |device, _| device.queue_size_max = Some(100)),
            ("more `sidecores` than `queues`", |device, _| device.sidecores = vec![String::new(), String::new()]),
            ("`idle` is", |device, _| device.idle = Some("often".to_owned())),
            ("`spin_us`", |device, _| device.spin_us = Some(u64::MAX)),
            ("`seg_max`", |device, _| device.seg_max = Some(0)),
            ("`front_end`", |device, _| device.front_end = Some("scsi".to_owned())),
            ("`interrupts` has no meaning", |device, _| device.interrupts = Some("msi".to_owned())),
            ("`block_size` has no meaning", |device, _| device.block_size = Some(512)),
            ("`size_max`", |device, _| device.size_max = Some(512)),
            ("`serial`", |device, _| device.serial = Some("x".repeat(21))),
            ("is no name for a volume", |_, function| function.volume = "../v".to_owned()),
            ("`weight` is a whole number from 1 to 1000", |_, function| function.weight = Some(0)),
            ("no meaning without `read_iops`", |_, function| function.read_iops_burst = Some(1)),
            ("at least 1", |_, function| function.write_bps = Some(0)),
        ];
        for (wanted, spoil) in faults {
            let mut device = good();
            let mut function = device.volume.take().unwrap();
            spoil(&mut device, &mut function);
            device.volume = Some(function);
            let said = device.settle().unwrap_err();
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
    }
}
