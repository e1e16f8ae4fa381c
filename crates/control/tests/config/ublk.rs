//! Block devices of this host's kernel.

use std::path::Path;

use sidecore_assembly::spec::{FrontEndSpec, Spec, UblkSpec};
use sidecore_control::{Config, Depth};

const TEXT: &str = r#"
[[sidecore]]
name = "sc0"
[[store]]
name = "mem"
type = "ram"
size = "1MiB"
[[store]]
name = "other"
type = "ram"
size = "1MiB"
[[device]]
name = "one"
front_end = "ublk"
number = 7
store = "mem"
[[device]]
name = "two"
front_end = "ublk"
number = 8
store = "other"
queues = 2
queue_depth = 64
io_size_max = "1MiB"
"#;

fn parsed(text: &str) -> Result<Spec, String> {
    let config = Config::parse(Path::new("/disks.toml"), text, Depth::Text);
    config.map(|config| config.spec).map_err(|problems| problems.to_string())
}

#[test]
fn a_block_device_of_the_kernel_has_a_number_and_no_socket() {
    let spec = parsed(TEXT).unwrap();
    let [one, two] = [&spec.devices[0], &spec.devices[1]];
    let usual = UblkSpec { number: 7, ..UblkSpec::default() };
    assert_eq!((usual.queue_depth, usual.io_bytes_max), (128, 256 << 10));
    assert_eq!(one.front_end, FrontEndSpec::Ublk(usual));
    let own = UblkSpec { number: 8, queue_depth: 64, io_bytes_max: 1 << 20 };
    assert_eq!((&two.front_end, two.queues), (&FrontEndSpec::Ublk(own), 2));
    assert_eq!((one.queues, &one.sidecores[..]), (1, &["sc0".to_owned()][..]));
}

#[test]
fn each_fault_of_such_a_device_is_named() {
    for (good, bad, message) in [
        ("number = 7\n", "", "`number` is missing"),
        ("number = 7\n", "number = 8\n", "this number is that of"),
        ("number = 7\n", "number = 1048576\n", "from 0 to 1048575"),
        ("number = 7\n", "number = 7\nsocket = \"/x.sock\"\n", "`socket` has no meaning"),
        ("number = 7\n", "number = 7\nserial = \"a\"\n", "`serial` has no meaning"),
        ("number = 7\n", "number = 7\nqueue_depth = 5000\n", "from 1 to 4096"),
        ("\"ublk\"\nnumber = 7\n", "\"virtio-blk\"\nsocket = \"/x\"\nnumber = 7\n", "`number`"),
        ("io_size_max = \"1MiB\"", "io_size_max = \"6000\"", "a multiple of 4KiB"),
        ("io_size_max = \"1MiB\"", "io_size_max = \"8MiB\"", "from 4KiB to 4MiB"),
    ] {
        assert_eq!(TEXT.matches(good).count(), 1, "{good}");
        let said = parsed(&TEXT.replace(good, bad)).unwrap_err();
        assert!(said.contains(message), "{message}: {said}");
    }
}
