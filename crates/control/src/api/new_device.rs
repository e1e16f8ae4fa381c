//! A device that is added while the daemon runs.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sidecore_assembly::spec::{DeviceSpec, StoreSpec};

use crate::config::json;

/// A device to add: `POST /v1/devices`. A device has the keys of a `[[device]]` in the
/// configuration file and, instead of `store`, may have a `volume`: an object with the keys of a
/// store of type `volume`, except for `size` and `quota`. Or a `remote`: an object with the keys of
/// a store of type `remote`, whose `device` is called as this one if it is missing. A NIC has a
/// `switch` and none of these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NewDevice(pub Map<String, Value>);

impl NewDevice {
    /// Makes a device of this name, served on this socket.
    #[must_use]
    pub fn new(name: &str, socket: &Path) -> Self {
        Self::default()
            .with("name", name)
            .with("socket", serde_json::to_value(socket).unwrap_or_default())
    }

    /// Sets a key's value.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    /// Sets a virtual function of a volume as the device's store.
    #[must_use]
    pub fn of_volume(self, controller: &str, volume: &str) -> Self {
        self.with("volume", serde_json::json!({ "controller": controller, "volume": volume }))
    }

    /// Sets a device of an IOhost as the device's store.
    #[must_use]
    pub fn of_iohost(self, iohost: &str, device: &str) -> Self {
        self.with("remote", serde_json::json!({ "iohost": iohost, "device": device }))
    }

    pub(super) fn settle(self) -> Result<(DeviceSpec, Option<StoreSpec>), String> {
        json::device(self.0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use sidecore_assembly::spec::{
        FrontEndSpec, IdleMode, Nanos, StageKind, StageSpec, StoreKind, VirtioBlkSpec, VolumeSpec,
    };
    use sidecore_stage_delay::DelayStage;

    use super::*;

    fn good() -> NewDevice {
        NewDevice::new("x", Path::new("/run/x.sock")).of_volume("c", "v")
    }

    #[test]
    fn missing_keys_have_the_defaults_of_the_configuration() {
        let (device, store) = good().settle().unwrap();
        assert_eq!(device.queues, 1);
        assert_eq!(device.front_end, FrontEndSpec::VirtioBlk(VirtioBlkSpec::default()));
        assert_eq!(device.idle, IdleMode::Adaptive { spin: Nanos::from_micros(50) });
        let store = store.unwrap();
        assert_eq!((device.store.as_str(), store.name.as_str()), ("c/v@x", "c/v@x"));
        assert_eq!(store.kind, StoreKind::Volume(VolumeSpec::new("c", "v")));
    }

    #[test]
    fn each_fault_is_named() {
        let long = format!("/{}", "a".repeat(107));
        let faults: &[(&str, &str, Value)] = &[
            ("a name has 1 to 64", "name", "a b".into()),
            ("absolute path", "socket", "x.sock".into()),
            ("`socket_mode` is three octal digits", "socket_mode", "rw".into()),
            ("holds 107 bytes", "socket", long.into()),
            ("either a `store`, a `volume` or a `remote`", "store", "mem".into()),
            ("either a `store`, a `volume` or a `remote`", "volume", Value::Null),
            ("`queues` must be a whole number from 1 to 64", "queues", 0.into()),
            ("`queues` must be a whole number from 1 to 64, not a float", "queues", 1.5.into()),
            ("power of two", "queue_size_max", 100.into()),
            ("2 sidecores for 1 queues", "sidecores", ["", ""].as_slice().into()),
            ("`sidecores` must be a list of strings", "sidecores", vec![Value::Null].into()),
            ("idle = \"often\" is not one of \"poll\"", "idle", "often".into()),
            ("`spin_us`", "spin_us", u64::MAX.into()),
            ("`seg_max`", "seg_max", 0.into()),
            (
                "front_end = \"scsi\" is not one of \"virtio-blk\", \"nvme\"",
                "front_end",
                "scsi".into(),
            ),
            ("`interrupts` has no meaning", "interrupts", "msi".into()),
            ("`block_size` has no meaning", "block_size", 512.into()),
            ("`size_max`", "size_max", 512.into()),
            ("`serial`", "serial", "x".repeat(21).into()),
            ("`serial`", "serial", "\u{7f}\n\"".into()),
            ("unknown key `queue`; did you mean `queues`?", "queue", 1.into()),
            ("`volume` must be a section", "volume", "v".into()),
        ];
        for (wanted, key, value) in faults {
            let said = good().with(key, value.clone()).settle().unwrap_err();
            assert!(said.contains(wanted), "{wanted}: {said}");
            assert!(!said.contains("; `") || key == &"volume", "more than one problem: {said}");
        }
        let of_volume: &[(&str, &str, Value)] = &[
            ("is no name for a volume", "volume", "../v".into()),
            ("`weight` must be a whole number from 1 to 1000", "weight", 0.into()),
            ("no meaning without `read_iops`", "read_iops_burst", 1.into()),
            ("`write_bps` is nothing", "write_bps", 0.into()),
            ("`size` belongs to the request that makes the volume", "size", 4096.into()),
            ("unknown key `wait`", "wait", 1.into()),
        ];
        for (wanted, key, value) in of_volume {
            let mut device = good();
            device.0["volume"][*key] = value.clone();
            let said = device.settle().unwrap_err();
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
        let of_stages: &[(&str, Value)] = &[
            ("`stage` is a list of sections", "delay".into()),
            ("`stage` is a list of sections", json!(["delay"])),
            ("`type` is missing", json!([null])),
            ("type = \"tape\" is not one of \"delay\"", json!([{ "type": "tape" }])),
            ("`delay_us` is missing", json!([{ "type": "fault" }, { "type": "delay" }])),
            ("`delay_us` must be a whole number", json!([{ "type": "delay", "delay_us": "1" }])),
            (
                "unknown key `eio_every`",
                json!([{ "type": "delay", "delay_us": 1, "eio_every": 1 }]),
            ),
        ];
        for (wanted, stages) in of_stages {
            let mut device = good();
            device.0["volume"]["stage"] = stages.clone();
            let said = device.settle().unwrap_err();
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
        let many = good().with("queues", 0).with("seg_max", 0).settle().unwrap_err();
        assert!(many.contains("`queues`") && many.contains("`seg_max`"), "{many}");
    }

    /// A path that a user of the API chooses would be one to append to with the daemon's rights.
    #[test]
    fn a_key_of_the_configuration_file_is_refused() {
        let with = |stage: Value| {
            let mut device = good();
            device.0["volume"]["stage"] = json!([stage]);
            device.settle()
        };
        let said = with(json!({ "type": "meter", "records": "/etc/profile" })).unwrap_err();
        assert_eq!(said, "`records` is allowed in the configuration file only");
        assert!(with(json!({ "type": "meter", "name": "tenant 7" })).is_ok());
    }

    #[test]
    fn a_remote_device_is_called_as_the_local_one_unless_it_says_otherwise() {
        let device = NewDevice::new("x", Path::new("/run/x.sock"));
        let remote = |remote: Value| device.clone().with("remote", remote).settle();
        let (spec, store) = remote(json!({ "iohost": "io1" })).unwrap();
        let store = store.unwrap();
        assert_eq!((spec.store.as_str(), store.name.as_str()), ("io1/x@x", "io1/x@x"));
        let kind = store.kind.remote().unwrap();
        assert_eq!((kind.iohost.as_str(), kind.device.as_deref()), ("io1", Some("x")));
        let (_, store) = device.clone().of_iohost("io1", "disk1").settle().unwrap();
        assert_eq!(store.unwrap().kind.remote().unwrap().device.as_deref(), Some("disk1"));
        assert!(remote(json!({})).unwrap_err().contains("`iohost` is missing"));
        let both = device.of_iohost("io1", "x").of_volume("c", "v").settle().unwrap_err();
        assert!(both.contains("either a `store`"), "{both}");
    }

    #[test]
    fn a_volume_may_have_stages_in_front_of_it() {
        let mut device = good();
        let stages =
            json!([{ "type": "fault", "ranges": [[0, 7]] }, { "type": "delay", "delay_us": 5 }]);
        device.0["volume"]["stage"] = stages;
        let (_, store) = device.settle().unwrap();
        let delay = DelayStage { delay_us: 5 };
        let words: Vec<_> = store.as_ref().unwrap().stages.iter().map(StageSpec::word).collect();
        assert_eq!(words, ["fault", "delay"]);
        assert_eq!(store.unwrap().stages[1], StageKind::Delay(delay).into());
    }

    #[test]
    fn keys_mean_the_same_in_json_as_in_the_file() {
        let text = "[[device]]\nname = \"x\"\nstore = \"s\"\nsocket = \"/x\"\nqueues = 3\n\
                    sidecores = [\"a\", \"b\"]\n\
                    idle = \"poll\"\nserial = \"q\\\"\\\\\"\npacked = true\nseg_max = 9\n\
                    socket_mode = \"0660\"\n\
                    [[sidecore]]\nname = \"a\"\n[[sidecore]]\nname = \"b\"\n\
                    [[store]]\nname = \"s\"\ntype = \"null\"\nsize = 512\n";
        let file = crate::Config::parse(Path::new("/c.toml"), text, crate::Depth::Text).unwrap();
        let json = r#"{"name":"x","store":"s","socket":"/x","queues":3,"sidecores":["a","b"],
                       "idle":"poll","serial":"q\"\\","packed":true,"seg_max":9,
                       "socket_mode":"0660","spin_us":null}"#;
        let device: NewDevice = serde_json::from_str(json).unwrap();
        assert_eq!(file.spec.devices, [device.settle().unwrap().0]);
    }
}
