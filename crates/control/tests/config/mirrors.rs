//! Faults of mirrors.

use sidecore_control::Depth;

use crate::{GOOD, directory, parse};

/// As [`FAULTS`](super::faults::FAULTS).
pub const MIRRORS: &[(&str, &str, &str, &[&str])] = &[
    (
        "a mirror without legs",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\n",
        "1:1",
        &["`legs` is missing"],
    ),
    (
        "an empty mirror",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = []\n",
        "4:8",
        &["a mirror has 1 to 8 legs, not 0"],
    ),
    (
        "a leg that does not exist",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"disk\", \"dis\"]\n",
        "4:17",
        &["there is no store \"dis\"", "did you mean \"disk\"?"],
    ),
    (
        "a leg twice",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"disk\", \"disk\"]\n",
        "4:17",
        &["leg \"disk\" is listed twice"],
    ),
    (
        "a leg in memory",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"disk\", \"mem\"]\n",
        "4:17",
        &["leg \"mem\" loses its bytes when the daemon ends"],
    ),
    (
        "a leg that a device uses",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\n\
         legs = [\"disk\"]\n[[device]]\nname = \"y\"\nstore = \"disk\"\nsocket = \"y.sock\"\n",
        "4:9",
        &["store \"disk\" is used by [[store]] \"x\" and by [[device]] \"y\""],
    ),
    (
        "a leg of two mirrors",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\n\
         legs = [\"disk\"]\n[[store]]\nname = \"y\"\ntype = \"mirror\"\nlegs = [\"disk\"]\n",
        "4:9",
        &["nothing else may use what is below a mirror"],
    ),
    (
        "a mirror that reads no leg",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"disk\"]\nread = \"mem\"\n",
        "5:8",
        &["\"mem\" is none of its `legs`"],
    ),
    (
        "an unknown witness",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"disk\"]\nwitness = \"etcd\"\n",
        "5:11",
        &["\"etcd\" is not one of \"none\", \"operator\""],
    ),
    (
        "a copy without a rate",
        "[[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"disk\"]\ncopy_bps = 0\n",
        "5:12",
        &["`copy_bps`"],
    ),
    (
        "a leg on a controller in memory",
        "[[store]]\nname = \"m\"\ntype = \"ram\"\nsize = \"1MiB\"\n\
         [[controller]]\nname = \"pool\"\nstore = \"m\"\nformat = \"blank\"\n\
         [[store]]\nname = \"part\"\ntype = \"volume\"\ncontroller = \"pool\"\nvolume = \"v\"\n\
         size = \"64KiB\"\n\
         [[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"part\"]\n",
        "18:9",
        &["leg \"part\" lies on store \"m\" of controller \"pool\", which loses its bytes"],
    ),
    (
        "a leg on a controller on another mirror",
        "[[store]]\nname = \"below\"\ntype = \"mirror\"\nlegs = [\"disk\"]\n\
         [[controller]]\nname = \"pool\"\nstore = \"below\"\n\
         [[store]]\nname = \"part\"\ntype = \"volume\"\ncontroller = \"pool\"\nvolume = \"v\"\n\
         [[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"part\"]\n",
        "16:9",
        &["leg \"part\" lies on store \"below\" of controller \"pool\", which is a mirror itself"],
    ),
];

/// A controller on a device of an IOhost is refused already, and then the mirror of its volume says
/// what would happen to it.
#[test]
fn a_leg_on_a_controller_whose_store_waits_for_an_iohost_is_refused() {
    let added = "[[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"wire.sock\"\n\
                 [[store]]\nname = \"far\"\ntype = \"remote\"\niohost = \"io1\"\n\
                 [[controller]]\nname = \"pool\"\nstore = \"far\"\n\
                 [[store]]\nname = \"part\"\ntype = \"volume\"\ncontroller = \"pool\"\n\
                 volume = \"v\"\n\
                 [[store]]\nname = \"x\"\ntype = \"mirror\"\nlegs = [\"part\"]\n\
                 [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n";
    let directory = directory();
    let problems = |fate: &str| {
        let text = format!("{GOOD}{added}on_disconnect = \"{fate}\"\n");
        parse(directory.path(), &text, Depth::Machine).unwrap_err().to_string()
    };
    let leg = "leg \"part\" lies on store \"far\" of controller \"pool\", which is a device of \
               iohost \"io1\", and the mirror would wait for it for as long as it is away; set \
               `on_disconnect = \"fail\"` there";
    let (stalls, fails) = (problems("stall"), problems("fail"));
    assert!(stalls.contains(leg), "{stalls}");
    assert!(!fails.contains("leg \"part\""), "{fails}");
}
