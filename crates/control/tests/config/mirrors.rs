//! Faults of mirrors.

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
];
