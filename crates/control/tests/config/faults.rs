//! The table of faults.

/// Text added to the good configuration, and the problem that it causes: `line:column` counted from
/// the first added line, and fragments of the message.
pub const FAULTS: &[(&str, &str, &str, &[&str])] = &[
    // The language.
    ("not TOML", "[[device]\n", "1:", &["this is not TOML"]),
    ("a key twice", "[[sidecore]]\nname = \"x\"\nname = \"y\"\n", "3:1", &["duplicate key"]),
    (
        "a wrong type",
        "[[sidecore]]\nname = \"x\"\ncpu = \"1\"\n",
        "3:7",
        &["[[sidecore]] \"x\"", "`cpu` must be a whole number", "not \"1\""],
    ),
    (
        "a negative number",
        "[[sidecore]]\nname = \"x\"\nspin_us = -1\n",
        "3:11",
        &["from 0 to 60000000", "not -1"],
    ),
    (
        "a section instead of a list",
        "[devices]\n",
        "1:",
        &["unknown key `devices`", "did you mean `device`?"],
    ),
    // Keys.
    (
        "an unknown key",
        "[[sidecore]]\nname = \"x\"\ncpus = 1\n",
        "3:1",
        &["unknown key `cpus`", "did you mean `cpu`?"],
    ),
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
    (
        "no name",
        "[[store]]\ntype = \"null\"\nsize = 512\n",
        "1:1",
        &["[[store]]", "`name` is missing"],
    ),
    ("a name with a space", "[[sidecore]]\nname = \"a b\"\n", "2:8", &["letters, digits"]),
    (
        "no type",
        "[[store]]\nname = \"x\"\nsize = 512\n",
        "1:1",
        &["`type` is missing", "type = \"file\""],
    ),
    (
        "an unknown type",
        "[[store]]\nname = \"x\"\ntype = \"tape\"\n",
        "3:8",
        &["\"tape\" is not one of \"null\", \"ram\", \"file\", \"delay\", \"fault\", \"volume\", \
           \"pf\""],
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
        "[[store]]\nname = \"x\"\ntype = \"delay\"\nstore = \"y\"\ndelay_us = 1\n\
         [[store]]\nname = \"y\"\ntype = \"fault\"\nstore = \"x\"\n",
        "9:9",
        &["in front of itself (through x, y)"],
    ),
    // Stages.
    (
        "a stage of no type",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\n[[store.stage]]\ndelay_us = 1\n",
        "5:1",
        &["[[store.stage]] of [[store]] \"x\"", "`type` is missing", "type = \"delay\""],
    ),
    (
        "a stage of an unknown type",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\n[[store.stage]]\ntype = \"null\"\n",
        "6:8",
        &["\"null\" is not one of \"delay\", \"encrypt\", \"fault\""],
    ),
    (
        "a stage without a key that it needs",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\n[[store.stage]]\ntype = \"delay\"\n",
        "5:1",
        &["`delay_us` is missing"],
    ),
    (
        "a bottom's key in a stage",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\n\
         [[store.stage]]\ntype = \"fault\"\nstore = \"mem\"\n",
        "7:1",
        &["unknown key `store`", "known here: type, seed"],
    ),
    (
        "a stage that is no section",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\nstage = \"delay\"\n",
        "5:9",
        &["write [[store.stage]]"],
    ),
    (
        "a number out of a stage's limits",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = 512\n\
         [[store.stage]]\ntype = \"delay\"\ndelay_us = -1\n",
        "7:12",
        &["from 0 to 60000000"],
    ),
    (
        "a store in front of itself with a stage",
        "[[store]]\nname = \"x\"\ntype = \"store\"\nstore = \"x\"\n\
         [[store.stage]]\ntype = \"fault\"\n",
        "4:9",
        &["in front of itself"],
    ),
    (
        "a type of two lines",
        "[[store]]\nname = \"x\"\ntype = \"a\\nb\"\n",
        "3:8",
        &["type = \"a\\nb\" is not one of"],
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
    (
        "a size beyond 2^63",
        "[[store]]\nname = \"x\"\ntype = \"null\"\nsize = \"9000000TiB\"\n",
        "4:8",
        &["2^63"],
    ),
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
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\n\
         serial = \"123456789012345678901\"\n",
        "5:10",
        &["more than 20 bytes"],
    ),
    (
        "a model number that is too long",
        "[[device]]\nname = \"x\"\nfront_end = \"nvme\"\nstore = \"mem\"\nsocket = \"x.sock\"\n\
         read_only = true\n\
         model = \"12345678901234567890123456789012345678901\"\n",
        "7:9",
        &["`model` is empty, more than 40 bytes"],
    ),
    (
        "a range backwards",
        "[[store]]\nname = \"x\"\ntype = \"fault\"\nstore = \"mem\"\nranges = [[9, 8]]\n",
        "5:10",
        &["pairs [first, last]"],
    ),
    (
        "a range beyond any store",
        "[[store]]\nname = \"x\"\ntype = \"fault\"\nstore = \"mem\"\n\
         ranges = [[0, 18446744073709551615]]\n",
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
        "an unknown map",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"used.img\"\nmap = \"tape\"\n",
        "5:7",
        &["host-file"],
    ),
    (
        "a host file that is not direct",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"used.img\"\nmap = \"host-file\"\n\
         direct = false\n",
        "5:7",
        &["always direct", "leave out `direct`"],
    ),
    (
        "a controller on a host file",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"blank.img\"\nmap = \"host-file\"\n\
         [[controller]]\nname = \"c\"\nstore = \"x\"\nformat = \"blank\"\n",
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
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nsidecore = \"sc0\"\n\
         sidecores = [\"sc1\"]\n",
        "6:13",
        &["exclude each other"],
    ),
    (
        "more sidecores than queues",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\n\
         sidecores = [\"sc0\", \"sc1\"]\n",
        "5:13",
        &["2 sidecores for 1 queue", "raise `queues`"],
    ),
    (
        "a sidecore twice",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nqueues = 2\n\
         sidecores = [\"sc0\", \"sc0\"]\n",
        "6:21",
        &["listed twice"],
    ),
    (
        "spinning while polling",
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"x.sock\"\nidle = \"poll\"\n\
         spin_us = 5\n",
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
        "[[device]]\nname = \"x\"\nfront_end = \"nvme\"\nstore = \"mem\"\nsocket = \"x.sock\"\n\
         interrupts = \"pin\"\n",
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
        "[[device]]\nname = \"x\"\nstore = \"mem\"\nsocket = \"/\
         aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\
         aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"\n",
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
    (
        "an empty file",
        "[[store]]\nname = \"x\"\ntype = \"file\"\npath = \"empty.img\"\n",
        "4:8",
        &["is empty"],
    ),
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
    (
        "a CPU there is not",
        "[[sidecore]]\nname = \"x\"\ncpu = 4095\n",
        "3:7",
        &["there is no CPU 4095"],
    ),
    (
        "memory there is not",
        "[[store]]\nname = \"x\"\ntype = \"ram\"\nsize = \"1024TiB\"\n",
        "4:8",
        &["1024TiB of memory", "are left"],
    ),
    (
        "two writers of a file",
        "[[store]]\nname = \"slow\"\ntype = \"delay\"\nstore = \"disk\"\ndelay_us = 1\n\
         [[device]]\nname = \"x\"\nstore = \"disk\"\nsocket = \"x.sock\"\n\
         [[device]]\nname = \"y\"\nstore = \"slow\"\nsocket = \"y.sock\"\n",
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
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"m\"\ntype = \"ram\"\nsize = \"1MiB\"\n\
         [[controller]]\nname = \"x\"\nstore = \"m\"\nformat = \"blank\"\n",
        "9:8",
        &["another [[controller]] of this name"],
    ),
    (
        "two controllers on a store",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[controller]]\nname = \"y\"\nstore = \"disk\"\n",
        "6:9",
        &["[[controller]] \"y\"", "store \"disk\" belongs to [[controller]] \"x\" already"],
    ),
    (
        "two controllers on a store, one in disguise",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"slow\"\ntype = \"delay\"\nstore = \"disk\"\ndelay_us = 1\n\
         [[controller]]\nname = \"y\"\nstore = \"slow\"\n",
        "11:9",
        &["store \"disk\" belongs to [[controller]] \"x\" already"],
    ),
    (
        "a controller on a store that keeps nothing",
        "[[store]]\nname = \"n\"\ntype = \"null\"\nsize = \"1MiB\"\n\
         [[controller]]\nname = \"x\"\nstore = \"n\"\n",
        "7:9",
        &["store \"n\" keeps nothing"],
    ),
    (
        "a controller on a store that refuses writes",
        "[[store]]\nname = \"ro\"\ntype = \"store\"\nstore = \"disk\"\n\
         [[store.stage]]\ntype = \"read-only\"\n[[controller]]\nname = \"x\"\nstore = \"ro\"\n",
        "9:9",
        &["store \"disk\" is behind a stage that refuses writes"],
    ),
    (
        "a controller on a function",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n\
         [[controller]]\nname = \"y\"\nstore = \"v\"\n",
        "11:9",
        &["store \"v\" is itself a function of a controller"],
    ),
    (
        "a device past its controller",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[device]]\nname = \"y\"\nstore = \"disk\"\nsocket = \"y.sock\"\n",
        "6:9",
        &[
            "[[device]] \"y\"",
            "store \"disk\" belongs to [[controller]] \"x\"",
            "type = \"volume\"",
        ],
    ),
    (
        "a volume of an unknown controller",
        "[[controller]]\nname = \"main\"\nstore = \"disk\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"mian\"\nvolume = \"v\"\n",
        "7:14",
        &["there is no controller \"mian\"", "did you mean \"main\"?"],
    ),
    (
        "a physical function that is not allowed",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"p\"\ntype = \"pf\"\ncontroller = \"x\"\n",
        "7:14",
        &["every block of every volume", "`physical_function = true`"],
    ),
    (
        "a volume twice",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n\
         [[store]]\nname = \"w\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n",
        "13:10",
        &["that of [[store]] \"v\" already"],
    ),
    (
        "two writers of a volume",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n\
         [[device]]\nname = \"y\"\nstore = \"v\"\nsocket = \"y.sock\"\n\
         [[device]]\nname = \"z\"\nstore = \"v\"\nsocket = \"z.sock\"\n",
        "15:9",
        &["[[device]] \"y\" writes to volume \"v\" too", "clone the volume"],
    ),
    (
        "a volume in part of a block",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\nformat = \"blank\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n\
         size = 1536\n",
        "10:8",
        &["1536B is not a multiple", "block size of 1KiB"],
    ),
    (
        "a volume's odd name",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"a/b\"\n",
        "8:10",
        &["\"a/b\" is no name for a volume", "letters, digits"],
    ),
    (
        "a granularity of its own",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\nformat = \"blank\"\n\
         block_size = \"2KiB\"\n",
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
        "[[controller]]\nname = \"x\"\nstore = \"b\"\n\
         [[store]]\nname = \"b\"\ntype = \"file\"\npath = \"blank.img\"\n",
        "7:8",
        &["blank.img is blank", "`sidecore controller format /", "`format = \"blank\"`"],
    ),
    (
        "a file with something on it",
        "[[controller]]\nname = \"x\"\nstore = \"b\"\nformat = \"blank\"\n\
         [[store]]\nname = \"b\"\ntype = \"file\"\npath = \"used.img\"\n",
        "8:8",
        &["used.img holds data that Sidecore does not know", "`--force`"],
    ),
    (
        "memory that may not be formatted",
        "[[store]]\nname = \"m\"\ntype = \"ram\"\nsize = \"1MiB\"\n\
         [[controller]]\nname = \"x\"\nstore = \"m\"\n",
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
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n\
         read_bps_burst = \"1MiB\"\n",
        "9:18",
        &["no meaning without `read_bps`"],
    ),
    (
        "a weight of 1001",
        "[[controller]]\nname = \"x\"\nstore = \"disk\"\n\
         [[store]]\nname = \"v\"\ntype = \"volume\"\ncontroller = \"x\"\nvolume = \"v\"\n\
         weight = 1001\n",
        "9:10",
        &["from 1 to 1000", "not 1001"],
    ),
    // Schedules of snapshots.
    (
        "a schedule that keeps nothing",
        "[[schedule]]\nname = \"x\"\nvolumes = [\"*\"]\nkeep = \"0 hourly\"\n",
        "4:8",
        &["[[schedule]] \"x\"", "\"0 hourly\" keeps 0; a rule keeps 1 to 1000"],
    ),
    (
        "a schedule that keeps too many",
        "[[schedule]]\nname = \"x\"\nvolumes = [\"*\"]\n\
         keep = \"7 daily, 99999999999999999999 hourly\"\n",
        "4:8",
        &["a rule keeps 1 to 1000"],
    ),
    (
        "an unknown period",
        "[[schedule]]\nname = \"x\"\nvolumes = [\"*\"]\nkeep = \"7 dayly\"\n",
        "4:8",
        &["\"dayly\" is no period", "`hourly`, `daily`"],
    ),
    (
        "a period across the hour",
        "[[schedule]]\nname = \"x\"\nvolumes = [\"*\"]\nkeep = \"4 every 25min\"\n",
        "4:8",
        &["minutes that divide an hour"],
    ),
    (
        "no pattern",
        "[[schedule]]\nname = \"x\"\nvolumes = []\nkeep = \"7 daily\"\n",
        "3:11",
        &["`volumes` is empty"],
    ),
    (
        "a pattern that fits nothing",
        "[[schedule]]\nname = \"x\"\nvolumes = [\"vm-*\", \"a b\"]\nkeep = \"7 daily\"\n",
        "3:11",
        &["\"a b\" in `volumes` fits no volume"],
    ),
    (
        "a schedule without volumes",
        "[[schedule]]\nname = \"x\"\nkeep = \"7 daily\"\n",
        "1:1",
        &["`volumes` is missing"],
    ),
    (
        "a schedule of an unknown controller",
        "[[schedule]]\nname = \"x\"\nvolumes = [\"*\"]\nkeep = \"7 daily\"\ncontroller = \"x\"\n",
        "5:14",
        &["there is no controller \"x\""],
    ),
    (
        "a schedule without a controller",
        "[[schedule]]\nname = \"x\"\nvolumes = [\"*\"]\nkeep = \"7 daily\"\n",
        "1:1",
        &["[[schedule]] \"x\"", "there is no [[controller]]"],
    ),
];
