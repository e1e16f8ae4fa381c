//! Every fault of a configuration is found, placed and explained. The table of faults is the specification.

use std::path::Path;

use sidecore_control::{Config, Depth, Problems, offline};
use tempfile::TempDir;

/// A configuration without faults, to put faults into.
const GOOD: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[sidecore]]
name = "sc1"
spin_us = 7
[[store]]
name = "mem"
type = "ram"
size = "1MiB"
[[store]]
name = "disk"
type = "file"
path = "disk.img"
[[device]]
name = "vd0"
store = "mem"
socket = "vd0.sock"
sidecore = "sc0"
"#;

/// Controllers and their functions without faults, to add to it.
const CONTROLLERS: &str = r#"
[[controller]]
name = "usual"
store = "disk"
[[store]]
name = "m"
type = "ram"
size = "1MiB"
[[controller]]
name = "own"
store = "m"
format = "blank"
block_size = "4KiB"
label = "the fast one"
btlb = 0
tree_memory = "8MiB"
commit_interval_ms = 100
warn_used_percent = 95
physical_function = true
[[store]]
name = "v"
type = "volume"
controller = "own"
volume = "v"
size = "10GiB"
quota = "1GiB"
weight = 300
read_iops = 1000
write_bps = "100MiB"
write_bps_burst = "1MiB"
[[store]]
name = "p"
type = "pf"
controller = "own"
"#;

/// A directory with what the configurations name.
fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in [("disk.img", 1 << 20), ("empty.img", 0), ("odd.img", 1000)] {
        std::fs::File::create(directory.path().join(name)).unwrap().set_len(bytes).unwrap();
    }
    offline::format(&directory.path().join("disk.img"), &offline::FormatSpec::default(), offline::GiveUp::Nothing)
        .unwrap();
    std::fs::File::create(directory.path().join("blank.img")).unwrap().set_len(1 << 20).unwrap();
    std::fs::write(directory.path().join("used.img"), vec![1; 1 << 20]).unwrap();
    std::os::unix::fs::symlink("disk.img", directory.path().join("alias.img")).unwrap();
    directory
}

fn parse(directory: &Path, text: &str, depth: Depth) -> Result<Config, Problems> {
    Config::parse(&directory.join("disks.toml"), text, depth)
}

/// What is added to the good configuration, and what is said about it: `line:column` counted from the first added
/// line, and fragments of the message.
const FAULTS: &[(&str, &str, &str, &[&str])] = &[
    // The language.
    ("not TOML", "[[device]\n", "1:", &["this is not TOML"]),
    ("a key twice", "[[sidecore]]\nname = \"x\"\nname = \"y\"\n", "3:1", &["duplicate key"]),
    (
        "a wrong type",
        "[[sidecore]]\nname = \"x\"\ncpu = \"1\"\n",
        "3:7",
        &["[[sidecore]] \"x\"", "`cpu` must be a whole number", "not \"1\""],
    ),
    ("a negative number", "[[sidecore]]\nname = \"x\"\nspin_us = -1\n", "3:11", &["from 0 to 60000000", "not -1"]),
    ("a section instead of a list", "[devices]\n", "1:", &["unknown key `devices`", "did you mean `device`?"]),
    // Keys.
    ("an unknown key", "[[sidecore]]\nname = \"x\"\ncpus = 1\n", "3:1", &["unknown key `cpus`", "did you mean `cpu`?"]),
    (
        "an unknown key unlike any",
        "[[sidecore]]\nname = \"x\"\ncolour = 1\n",
        "3:1",
        &["known here: name, cpu, spin_us"],
    ),
    (
        "another type's key",
        "[[store]]\nname = \"x\"\ntype = \"ram\"\nsize = 4096\npath = \"p\"\n",
        "5:1",
        &["[[store]] \"x\"", "unknown key `path`"],
    ),
    ("no name", "[[store]]\ntype = \"null\"\nsize = 512\n", "1:1", &["[[store]]", "`name` is missing"]),
    ("a name with a space", "[[sidecore]]\nname = \"a b\"\n", "2:8", &["letters, digits"]),
    ("no type", "[[store]]\nname = \"x\"\nsize = 512\n", "1:1", &["`type` is missing", "type = \"file\""]),
    (
        "an unknown type",
        "[[store]]\nname = \"x\"\ntype = \"tape\"\n",
        "3:8",
        &["\"tape\" is not one of \"null\", \"ram\", \"file\", \"delay\", \"fault\", \"volume\", \"pf\""],
    ),
    (
        "a device without store",
        "[[device]]\nname = \"x\"\nsocket = \"x.sock\"\n",
        "1:1",
        &["[[device]] \"x\"", "`store` is missing"],
    ),
    // Names that lead nowhere, or to more than one thing.
    (
        "two stores of a name",
        "[[store]]\nname = \"mem\"\ntype = \"null\"\nsize = 512\n",
        "2:8",
        &["another [[store]] of this name"],
    ),
    (
        "two devices of a name",
        "[[device]]\nname = \"vd0\"\nstore = \"mem\"\nsocket = \"x.sock\"\n",
        "2:8",
        &["another [[device]]"],
    ),
    (
        "an unknown store",
        "[[device]]\nname = \"x\"\nstore = \"memm\"\nsocket = \"x.sock\"\n",
        "3:9",
        &["there is no store \"memm\"", "did you mean \"mem\"?"],
    ),
    (
        "a delay of an unknown store",
        "[[store]]\nname = \"x\"\ntype = \"delay\"\nstore = \"tape\"\ndelay_us = 1\n",
        "4:9",
        &["there is no store \"tape\"", "add a section [[store]]"],
    ),
    (
        "an unknown sidecore",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nsidecore = \"sc9\"\n",
        "5:12",
        &["there is no sidecore \"sc9\""],
    ),
    (
        "a store in front of itself",
        "[[store]]\nname = \"x\"\ntype = \"delay\"\nstore = \"x\"\ndelay_us = 1\n",
        "4:9",
        &["in front of itself"],
    ),
    (
        "stores in a circle",
        "[[store]]\nname = \"x\"\ntype = \"delay\"\nstore = \"y\"\ndelay_us = 1\n[[store]]\nname = \"y\"\ntype = \"fault\"\nstore = \"x\"\n",
        "9:9",
        &["in front of itself (through x, y)"],
    ),
    // Numbers.
    ("no size", "[[store]]\nname = \"x\"\ntype = \"null\"\n", "1:1", &["`size` is missing"]),
    (
        "a size of nothing",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 0\n",
        "4:8",
        &["0 bytes is not a positive multiple"],
    ),
    (
        "a size in part of a block",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = \"1KiB\"\nblock_size = 4096\n",
        "4:8",
        &["1024 bytes", "block size of 4096"],
    ),
    (
        "a size with a decimal unit",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = \"1GB\"\n",
        "4:8",
        &["power of ten"],
    ),
    ("a size beyond 2^63", "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = \"9000000TiB\"\n", "4:8", &["2^63"]),
    (
        "a block size of its own",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 1024\nblock_size = 1024\n",
        "5:14",
        &["neither 512 nor 4096"],
    ),
    (
        "no queues",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nqueues = 0\n",
        "5:10",
        &["from 1 to 64", "not 0"],
    ),
    (
        "65 queues",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nqueues = 65\n",
        "5:10",
        &["from 1 to 64", "not 65"],
    ),
    (
        "a ring of 100",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nqueue_size_max = 100\n",
        "5:18",
        &["no power of two", "128"],
    ),
    (
        "a long serial number",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nserial = \"123456789012345678901\"\n",
        "5:10",
        &["more than 20 bytes"],
    ),
    (
        "a range backwards",
        "[[store]]\nname = \"x\"\ntype = \"fault\"\nstore = \"mem\"\nranges = [[9, 8]]\n",
        "5:10",
        &["pairs [first, last]"],
    ),
    (
        "a range beyond any store",
        "[[store]]\nname = \"x\"\ntype = \"fault\"\nstore = \"mem\"\nranges = [[0, 18446744073709551615]]\n",
        "5:10",
        &["`ranges`"],
    ),
    (
        "a fault in none",
        "[[store]]\nname = \"x\"\ntype = \"fault\"\nstore = \"mem\"\neio_every = 0\n",
        "5:13",
        &["from 1 to 1000000"],
    ),
    (
        "a map that nobody knows",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"used.img\"\nmap = \"tape\"\n",
        "5:7",
        &["host-file"],
    ),
    (
        "a host file that is not direct",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"used.img\"\nmap = \"host-file\"\ndirect = false\n",
        "5:7",
        &["always direct", "leave out `direct`"],
    ),
    (
        "a controller on a host file",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"blank.img\"\nmap = \"host-file\"\n[[controller]]\nname = \"c\"\nstore = \"x\"\nformat = \"blank\"\n",
        "8:9",
        &["belongs to the host's filesystem"],
    ),
    // Sidecores.
    (
        "one CPU for two",
        "[[sidecore]]\nname = \"x\"\ncpu = 0\n[[sidecore]]\nname = \"y\"\ncpu = 0\n",
        "6:7",
        &["CPU 0 is taken by [[sidecore]] \"x\""],
    ),
    (
        "both keys for sidecores",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nsidecore = \"sc0\"\nsidecores = [\"sc1\"]\n",
        "6:13",
        &["exclude each other"],
    ),
    (
        "more sidecores than queues",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nsidecores = [\"sc0\", \"sc1\"]\n",
        "5:13",
        &["2 sidecores for 1 queue", "raise `queues`"],
    ),
    (
        "a sidecore twice",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nqueues = 2\nsidecores = [\"sc0\", \"sc0\"]\n",
        "6:21",
        &["listed twice"],
    ),
    (
        "spinning while polling",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nidle = \"poll\"\nspin_us = 5\n",
        "6:11",
        &["no meaning with idle = \"poll\""],
    ),
    // Interrupts.
    (
        "interrupts of a virtio disk",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\ninterrupts = \"msi\"\n",
        "1:1",
        &["`interrupts` has no meaning with front_end = \"virtio-blk\""],
    ),
    (
        "interrupts of an unknown kind",
        "[[device]]\nname = \"x\"\nfront_end = \"nvme\"\nstore = \"mem\"\nsocket = \"x.sock\"\ninterrupts = \"pin\"\n",
        "6:14",
        &["\"pin\" is not one of \"msi-x\", \"msi\""],
    ),
    // Sockets.
    (
        "a socket twice",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"vd0.sock\"\n",
        "4:10",
        &["that of [[device]] \"vd0\""],
    ),
    (
        "a socket twice in disguise",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"./vd0.sock\"\n",
        "4:10",
        &["that of [[device]] \"vd0\""],
    ),
    (
        "the control API's socket",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"control.sock\"\n",
        "4:10",
        &["that of the control API"],
    ),
    (
        "a path of 108 bytes",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"\n",
        "4:10",
        &["holds 107 bytes", "this one has 108"],
    ),
    (
        "a socket nowhere",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"/no/such/x.sock\"\n",
        "4:10",
        &["no directory /no/such", "mkdir -p /no/such"],
    ),
    (
        "a socket where a file is",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"disk.img\"\n",
        "4:10",
        &["is no socket", "choose another path"],
    ),
    // Files and the machine.
    (
        "a missing file",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"no.img\"\n",
        "4:8",
        &["there is no file", "truncate"],
    ),
    ("an empty file", "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"empty.img\"\n", "4:8", &["is empty"]),
    (
        "a file in part of a block",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"odd.img\"\n",
        "4:8",
        &["1000 bytes", "multiple of the block size"],
    ),
    (
        "a directory",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"/tmp\"\n",
        "4:8",
        &["neither a regular file nor a block device"],
    ),
    (
        "a file twice",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"alias.img\"\n",
        "4:8",
        &["that of [[store]] \"disk\" already"],
    ),
    ("a CPU there is not", "[[sidecore]]\nname = \"x\"\ncpu = 4095\n", "3:7", &["there is no CPU 4095"]),
    (
        "memory there is not",
        "[[store]]\nname = \"x\"\ntype = \"ram\"\nsize = \"1024TiB\"\n",
        "4:8",
        &["1024TiB of memory", "are left"],
    ),
    (
        "two writers of a file",
        "[[store]]\nname = \"slow\"\ntype = \"delay\"\nstore = \"disk\"\ndelay_us = 1\n[[device]]\nname = \"x\"\nstore = \"disk\"\nsocket = \"x.sock\"\n[[device]]\nname = \"y\"\nstore = \"slow\"\nsocket = \"y.sock\"\n",
        "12:9",
        &["[[device]] \"x\" writes to the file of store \"disk\" too", "read_only = true"],
    ),
    // Controllers and their functions.
    (
        "a controller without store",
        "[[controller]]\nname = \"x\"\n",
        "1:1",
        &["[[controller]] \"x\"", "`store` is missing"],
    ),
    (
        "a controller of an unknown store",
        "[[controller]]\nname = \"x\"\nstore = \"dsk\"\n",
        "3:9",
        &["there is no store \"dsk\"", "did you mean \"disk\"?"],
    ),
    (
        "two controllers of a name",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"m\"\ntype = \"ram\"\nsize = \"1MiB\"\n[[controller]]\nname = \"x\"\nstore = \"m\"\nformat = \"blank\"\n",
        "9:8",
        &["another [[controller]] of this name"],
    ),
    (
        "two controllers on a store",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[controller]]\nname = \"y\"\nstore = \"disk\"\n",
        "6:9",
        &["[[controller]] \"y\"", "store \"disk\" belongs to [[controller]] \"x\" already"],
    ),
    (
        "two controllers on a store, one in disguise",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"slow\"\ntype = \"delay\"\nstore = \"disk\"\ndelay_us = 1\n[[controller]]\nname = \"y\"\nstore = \"slow\"\n",
        "11:9",
        &["store \"disk\" belongs to [[controller]] \"x\" already"],
    ),
    (
        "a controller on a store that keeps nothing",
        "[[store]]\nname = \"n\"\ntype = \"null\"\nsize = \"1MiB\"\n[[controller]]\nname = \"x\"\nstore = \"n\"\n",
        "7:9",
        &["store \"n\" keeps nothing"],
    ),
    (
        "a controller on a function",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n[[controller]]\nname = \"y\"\nstore = \"v\"\n",
        "11:9",
        &["store \"v\" is itself a function of a controller"],
    ),
    (
        "a device past its controller",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[device]]\nname = \"y\"\nstore = \"disk\"\nsocket = \"y.sock\"\n",
        "6:9",
        &["[[device]] \"y\"", "store \"disk\" belongs to [[controller]] \"x\"", "type = \"volume\""],
    ),
    (
        "a volume of an unknown controller",
        "[[controller]]\nname = \"main\"\nstore = \"disk\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"mian\"\nvolume = \"v\"\n",
        "7:14",
        &["there is no controller \"mian\"", "did you mean \"main\"?"],
    ),
    (
        "a physical function that is not allowed",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"p\"\ntype = \"pf\"\ncontroller = \"x\"\n",
        "7:14",
        &["every block of every volume", "`physical_function = true`"],
    ),
    (
        "a volume twice",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n[[store]]\nname = \"w\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n",
        "13:10",
        &["that of [[store]] \"v\" already"],
    ),
    (
        "two writers of a volume",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n[[device]]\nname = \"y\"\nstore = \"v\"\nsocket = \"y.sock\"\n[[device]]\nname = \"z\"\nstore = \"v\"\nsocket = \"z.sock\"\n",
        "15:9",
        &["[[device]] \"y\" writes to volume \"v\" too", "clone the volume"],
    ),
    (
        "a volume in part of a block",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\nformat = \"blank\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\nsize = 1536\n",
        "10:8",
        &["1536B is not a multiple", "block size of 1KiB"],
    ),
    (
        "a volume's odd name",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"a/b\"\n",
        "8:10",
        &["\"a/b\" is no name for a volume", "letters, digits"],
    ),
    (
        "a granularity of its own",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\nformat = \"blank\"\nblock_size = \"2KiB\"\n",
        "5:14",
        &["2KiB is none of 512, \"1KiB\" and \"4KiB\""],
    ),
    (
        "a granularity that is never used",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\nblock_size = \"4KiB\"\n",
        "4:14",
        &["`block_size` is of use only where a store is formatted", "`format = \"blank\"`"],
    ),
    (
        "a blank file that may not be formatted",
        "[[controller]]\nname = \"x\"\nstore = \"b\"\n[[store]]\nname = \"b\"\ntype = \"file\"\npath = \"blank.img\"\n",
        "7:8",
        &["blank.img is blank", "`sidecore controller format /", "`format = \"blank\"`"],
    ),
    (
        "a file with something on it",
        "[[controller]]\nname = \"x\"\nstore = \"b\"\nformat = \"blank\"\n[[store]]\nname = \"b\"\ntype = \"file\"\npath = \"used.img\"\n",
        "8:8",
        &["used.img holds something", "`--force`"],
    ),
    (
        "memory that may not be formatted",
        "[[store]]\nname = \"m\"\ntype = \"ram\"\nsize = \"1MiB\"\n[[controller]]\nname = \"x\"\nstore = \"m\"\n",
        "7:9",
        &["blank at every start", "`format = \"blank\"`"],
    ),
    (
        "an unknown way to format",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\nformat = \"always\"\n",
        "4:10",
        &["\"always\" is not one of \"never\", \"blank\""],
    ),
    (
        "no memory for trees",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\ntree_memory = 4096\n",
        "4:15",
        &["less than 4MiB"],
    ),
    (
        "a burst of no rate",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\nread_bps_burst = \"1MiB\"\n",
        "9:18",
        &["no meaning without `read_bps`"],
    ),
    (
        "a weight of 1001",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n[[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\nweight = 1001\n",
        "9:10",
        &["from 1 to 1000", "not 1001"],
    ),
];

#[test]
fn each_fault_is_found_at_its_place_and_nothing_else_is() {
    let directory = directory();
    let offset = GOOD.matches('\n').count();
    for (name, added, place, fragments) in FAULTS {
        let problems = match parse(directory.path(), &format!("{GOOD}{added}"), Depth::Machine) {
            Ok(_) => panic!("{name}: not found"),
            Err(problems) => problems,
        };
        let text = problems.to_string();
        let (line, column) = place.split_once(':').unwrap();
        let line = line.parse::<usize>().unwrap() + offset;
        let last = text.lines().last().unwrap();
        assert!(last.contains(&format!("disks.toml:{line}:{column}")), "{name}: not at {place} (line {line}): {text}");
        for fragment in *fragments {
            assert!(text.contains(fragment), "{name}: no word of {fragment}: {text}");
        }
        // A circle is reported by each store in it; anything else once.
        let expected = if *name == "stores in a circle" { 2 } else { 1 };
        assert_eq!(problems.list.len(), expected, "{name}: {text}");
    }
}

#[test]
fn all_faults_are_reported_at_once_in_the_order_of_the_file() {
    let directory = directory();
    let text = "[[device]]\nname = \"x\"\nstore = \"nowhere\"\nsocket = \"/no/such/x.sock\"\nqueues = 0\nqeues = 1\n";
    let problems = parse(directory.path(), text, Depth::Machine).unwrap_err();
    let lines: Vec<usize> = problems.list.iter().filter_map(|problem| Some(problem.place?.0)).collect();
    // The default control socket's directory may or may not be there.
    let lines: Vec<usize> = lines.into_iter().filter(|line| *line > 1).collect();
    assert_eq!(lines, [3, 4, 5, 6], "{problems}");
    assert!(problems.to_string().contains("add a section [[sidecore]]"), "{problems}");
}

#[test]
fn the_good_one_is_good_and_means_what_it_says() {
    use sidecore_assembly::spec::{IdleMode, Nanos};
    let directory = directory();
    let more = "[[device]]\nname = \"vd1\"\nstore = \"disk\"\nsocket = \"vd1.sock\"\nqueues = 3\n\
        [[device]]\nname = \"vd2\"\nstore = \"disk\"\nread_only = true\nsocket = \"vd2.sock\"\n";
    let config = parse(directory.path(), &format!("{GOOD}{more}"), Depth::Machine).unwrap();
    assert_eq!(config.control_socket, directory.path().join("control.sock"));
    let devices = &config.spec.devices;
    assert_eq!(devices[0].sidecores, ["sc0"]);
    assert_eq!(devices[0].idle, IdleMode::Adaptive { spin: Nanos::from_micros(50) });
    assert_eq!((devices[0].queues, devices[0].queue_size_max), (1, 1024));
    // Those that name no sidecore go where there are fewest queues, and spin as it says.
    assert_eq!(devices[1].sidecores, ["sc1"]);
    assert_eq!(devices[1].idle, IdleMode::Adaptive { spin: Nanos::from_micros(7) });
    assert_eq!(devices[2].sidecores, ["sc0"]);
}

#[test]
fn a_function_has_msi_x_unless_it_is_told_to_have_msi() {
    use sidecore_assembly::spec::Interrupts;
    let directory = directory();
    let device = |rest: &str| {
        let function = format!(
            "[[device]]\nname = \"x\"\nfront_end = \"nvme\"\nstore = \"mem\"\nsocket = \"x.sock\"\nread_only = true\n{rest}"
        );
        let config = parse(directory.path(), &format!("{GOOD}{function}"), Depth::Text).unwrap();
        config.spec.devices.last().unwrap().interrupts
    };
    assert_eq!((device(""), device("interrupts = \"msi\"\n")), (Interrupts::MsiX, Interrupts::Msi));
}

#[test]
fn controllers_and_volumes_mean_what_they_say() {
    use sidecore_assembly::spec::{FormatSpec, LimitSpec, LimitsSpec, StoreKind};
    let directory = directory();
    let config = parse(directory.path(), &format!("{GOOD}{CONTROLLERS}"), Depth::Machine).unwrap();
    let [usual, own] = &config.spec.controllers[..] else { panic!("{config:?}") };
    assert_eq!((usual.format.clone(), usual.btlb_entries, usual.tree_memory_bytes), (None, 8, 64 << 20));
    assert_eq!((usual.commit_interval.as_millis(), usual.physical_function), (5000, false));
    assert_eq!((usual.warn_used_percent, own.warn_used_percent), (80, 95));
    assert_eq!(own.format, Some(FormatSpec { block_bytes: 4096, label: "the fast one".to_owned() }));
    assert_eq!((own.btlb_entries, own.commit_interval.as_millis(), own.physical_function), (0, 100, true));
    let StoreKind::Volume(volume) = &config.spec.stores[3].kind else { panic!("{config:?}") };
    assert_eq!((volume.size_bytes, volume.quota_bytes, volume.weight), (Some(10 << 30), Some(1 << 30), 300));
    let limits = LimitsSpec {
        read_iops: Some(LimitSpec { per_s: 1000, burst: 1000 }),
        write_bps: Some(LimitSpec { per_s: 100 << 20, burst: 1 << 20 }),
        ..LimitsSpec::default()
    };
    assert_eq!(volume.limits, limits);
}

#[test]
fn the_text_can_be_checked_without_the_machine() {
    let nowhere = Path::new("/no/such");
    assert!(parse(nowhere, GOOD, Depth::Machine).is_err());
    assert!(parse(nowhere, GOOD, Depth::Text).is_ok());
}

#[test]
fn a_busy_file_is_reported() {
    let directory = directory();
    let options = sidecore_assembly::spec::FileOptions::new(directory.path().join("disk.img"));
    let config = parse(directory.path(), GOOD, Depth::Machine).unwrap();
    let assembly = {
        let mut spec = config.spec;
        spec.devices[0].store = "disk".to_owned();
        sidecore_assembly::Assembly::start(&spec).unwrap()
    };
    let problems = parse(directory.path(), GOOD, Depth::Machine).unwrap_err().to_string();
    assert!(problems.contains(&format!("{} is in use", options.path.display())), "{problems}");
    assert!(problems.contains("a program is serving"), "{problems}");
    drop(assembly);
    assert!(parse(directory.path(), GOOD, Depth::Machine).is_ok());
}

#[test]
fn checking_leaves_no_trace() {
    let directory = directory();
    let list = || {
        let mut names: Vec<_> =
            std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = list();
    let config = directory.path().join("disks.toml");
    assert!(Config::load(&config, Depth::Machine).unwrap_err().to_string().contains("there is no such file"));
    parse(directory.path(), GOOD, Depth::Machine).unwrap();
    assert_eq!(list(), before);
}

#[test]
fn what_is_no_configuration_is_refused_and_never_panics() {
    let directory = directory();
    let file = directory.path().join("big.toml");
    std::fs::write(&file, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(Config::load(&file, Depth::Text).unwrap_err().to_string().contains("larger than 1MiB"));
    std::fs::write(&file, [0xff, 0xfe]).unwrap();
    assert!(Config::load(&file, Depth::Text).unwrap_err().to_string().contains("cannot be read"));
    assert!(Config::load(directory.path(), Depth::Text).is_err());
    // Every prefix of good ones, every byte of them replaced, and some nonsense.
    for good in [GOOD, CONTROLLERS] {
        for end in 0..good.len() {
            let _ = parse(directory.path(), &good[..end], Depth::Text);
            for byte in ["\"", "[", "=", "\u{e9}"] {
                let text = format!("{}{byte}{}", &good[..end], &good[end + 1..]);
                let _ = parse(directory.path(), &text, Depth::Text);
            }
        }
    }
    for text in [
        "device = [1, 2]",
        "device = [[]]",
        "store = [{}]",
        &"[".repeat(100_000),
        &"a.".repeat(50_000),
        &"[[device]]\n".repeat(90_000),
    ] {
        let problems = parse(directory.path(), text, Depth::Text).unwrap_err();
        assert!(problems.list.len() <= 100);
    }
}

/// The keys that a section may have, as a misfit of a key makes it tell.
fn known_keys(section: &str) -> Vec<String> {
    let problems =
        parse(Path::new("/"), &format!("{section}\nxxxxxxxxxxxx = 1\n"), Depth::Text).unwrap_err().to_string();
    let (_, list) = problems.split_once("known here: ").unwrap_or_else(|| panic!("{problems}"));
    list.lines().next().unwrap().split(", ").map(str::to_owned).collect()
}

#[test]
fn the_manual_lists_the_keys_that_there_are_and_its_example_is_good() {
    let manual = include_str!("../../../docs/config.md");
    for (heading, section) in [
        ("## [[sidecore]]", "[[sidecore]]"),
        ("### type = \"null\"", "[[store]]\ntype = \"null\""),
        ("### type = \"ram\"", "[[store]]\ntype = \"ram\""),
        ("### type = \"file\"", "[[store]]\ntype = \"file\""),
        ("### type = \"delay\"", "[[store]]\ntype = \"delay\""),
        ("### type = \"fault\"", "[[store]]\ntype = \"fault\""),
        ("### type = \"volume\"", "[[store]]\ntype = \"volume\""),
        ("### type = \"pf\"", "[[store]]\ntype = \"pf\""),
        ("## [[controller]]", "[[controller]]"),
        ("## [[device]]", "[[device]]"),
    ] {
        let (_, chapter) = manual.split_once(&format!("{heading}\n")).unwrap();
        let chapter = chapter.split("\n##").next().unwrap();
        let mut listed: Vec<&str> =
            chapter.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
        if heading.starts_with("###") {
            listed.splice(0..0, ["name", "type"]);
        }
        let mut known = known_keys(section);
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known, "{heading}");
    }
    let example = manual.split_once("```toml\n").unwrap().1.split_once("```").unwrap().0;
    let config = parse(Path::new("/"), example, Depth::Text).unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(config.spec.devices.len(), 2);
}
