//! Encrypted disks over vhost-user: the daemon's, beside those of qemu-storage-daemon's LUKS
//! driver.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sidecore_driver::{BlkClient, ClientOptions};
use sidecore_luks::{Kdf, NewHeader, write_header};

use super::cases::SECTOR;
use super::{NAME, Plan};
use crate::experiment::Experiment;
use crate::fill::{allocated_file, directory_in_memory};
use crate::load::{self, BLOCK_BYTES, Work};
use crate::peer::{self, Disk};
use crate::process::Process;
use crate::record::{OURS, Params};
use crate::runs::{IOPS, LATENCY_P50, LATENCY_P99, Runs, record_ratios};
use crate::sidecored;

/// The measured operations and depths.
pub(super) const CASES: [(&str, bool, u16); 4] = [
    ("encrypt/file/randread/qd1/disk", false, 1),
    ("encrypt/file/randread/qd32/disk", false, 32),
    ("encrypt/file/randwrite/qd1/disk", true, 1),
    ("encrypt/file/randwrite/qd32/disk", true, 32),
];

/// Room for the header of LUKS in front of the data.
const HEADER_BYTES: u64 = 16 << 20;
/// The derivation of the key takes no part in the measurement.
const ITERATIONS: u32 = 1000;

/// One system in the comparison.
struct System<'a> {
    name: &'static str,
    process: &'a mut Process,
    client: BlkClient,
    params: Params,
    runs: Runs,
}

/// Measures the cases that `wants` selects. Without the peer there is nothing to compare with.
///
/// # Errors
/// A program does not start or fails; an interrupt.
pub(super) fn measure(
    experiment: &mut Experiment,
    plan: &Plan,
    wants: impl Fn(&str) -> bool,
) -> Result<()> {
    let cases: Vec<_> = CASES.into_iter().filter(|(case, ..)| wants(case)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let Some(program) = experiment.find_peer() else { return Ok(()) };
    let files = directory_in_memory()?;
    let file = |name: &str, bytes| allocated_file(&files.path().join(name), bytes);
    let key = files.path().join("key");
    std::fs::write(&key, "a passphrase like any other")?;
    std::fs::set_permissions(&key, Permissions::from_mode(0o600))?;
    let our_file = file("ours", plan.store_bytes)?;
    let mut ours = experiment
        .start_configured(NAME, &[], |directory| configuration(directory, &our_file, &key))?;
    ours.process.freeze()?;
    let their_file = file("theirs", plan.store_bytes + HEADER_BYTES)?;
    if let Err(error) = format(&their_file, &key) {
        eprintln!("  no peer: {error:#}");
        return ours.process.end();
    }
    let disk = Disk::Luks { path: their_file, key };
    let mut theirs = experiment.start_peer(&program, "peer-luks", &disk, 1, plan.trial)?;
    let socket = ours.socket(NAME);
    let of_theirs = theirs.params(&program);
    let mut systems = [
        System::connect(OURS, &mut ours.process, &socket, experiment.params())?,
        System::connect(
            peer::NAME,
            &mut theirs.process,
            &theirs.socket,
            experiment.params().into_iter().chain(of_theirs).collect(),
        )?,
    ];
    for (case, write, depth) in cases {
        let blocks = plan.store_bytes / u64::from(BLOCK_BYTES);
        let work = Work { write, depth, blocks, duration: plan.measured, ..Work::default() };
        measure_case(experiment, plan, case, &work, &mut systems)?;
    }
    drop(systems);
    ours.process.end()
}

fn measure_case(
    experiment: &mut Experiment,
    plan: &Plan,
    case: &str,
    work: &Work,
    systems: &mut [System<'_>; 2],
) -> Result<()> {
    for system in &mut *systems {
        system.runs = Runs::default();
    }
    for round in 0..plan.rounds {
        for turn in 0..2 {
            let System { name, process, client, runs, .. } = &mut systems[(round + turn) % 2];
            let run = experiment.round(process, plan.warm_up, work, |work, clock| {
                load::run(client.queue(0).context("no queue")?, work, clock)
            });
            runs.add(run.with_context(|| format!("measuring {name}"))?);
        }
    }
    let mut line = format!("  {case:<36}");
    for system in &*systems {
        let metrics = [IOPS, LATENCY_P50, LATENCY_P99];
        for metric in metrics.iter().filter(|metric| !metric.alone || work.depth == 1) {
            let params = system.runs.params(work, system.params.clone());
            let (median, params) = system.runs.settle(metric, work, params);
            if metric.name == IOPS.name {
                line.push_str(&format!("  {} {:.0} k/s", system.name, median / 1e3));
            }
            experiment.records.measure(case, system.name, metric.name, median, metric.unit, params);
        }
    }
    let [ours, theirs] = systems.each_ref().map(|system| (system.name, &system.runs));
    record_ratios(&mut experiment.records, case, work, work.depth == 1, ours, theirs);
    eprintln!("{line}");
    Ok(())
}

impl<'a> System<'a> {
    fn connect(
        name: &'static str,
        process: &'a mut Process,
        socket: &Path,
        params: Params,
    ) -> Result<Self> {
        process.thaw()?;
        let options = ClientOptions { slots: 32, ..ClientOptions::default() };
        let client =
            BlkClient::connect(socket, &options).with_context(|| format!("cannot use {name}"))?;
        process.freeze()?;
        Ok(Self { name, process, client, params, runs: Runs::default() })
    }
}

/// A daemon with an encrypted file, whose header is beside its configuration.
fn configuration(directory: &Path, file: &Path, key: &Path) -> Result<String> {
    let header: PathBuf = directory.join("header");
    let new = NewHeader { sector: SECTOR, kdf: Kdf::Pbkdf2 { iterations: ITERATIONS } };
    let passphrase = sidecore_luks::read_key_file(key)?;
    write_header(&header, &new.make(&passphrase)?, false)?;
    let head = sidecored::head(directory);
    let socket = directory.join(format!("{NAME}.sock"));
    Ok(format!(
        "{head}[[store]]\nname = {NAME:?}\ntype = \"file\"\npath = {file:?}\n\
         [[store.stage]]\ntype = \"encrypt\"\nheader = {header:?}\nkey_file = {key:?}\n\
         [[device]]\nname = {NAME:?}\nstore = {NAME:?}\nsocket = {socket:?}\n\
         front_end = \"virtio-blk\"\nsidecore = \"sc0\"\nidle = \"poll\"\n"
    ))
}

/// Makes a header of LUKS1, the newest that the peer reads, with the cipher of the stage.
fn format(file: &Path, key: &Path) -> Result<()> {
    let options = "luksFormat --batch-mode --type luks1 --cipher aes-xts-plain64 --key-size 512 \
                   --pbkdf-force-iterations";
    let mut command = Command::new("cryptsetup");
    command.args(options.split(' ')).arg(ITERATIONS.to_string());
    let output = command.arg(file).arg(key).output();
    let output = output.context("cannot run cryptsetup, which makes the peer's header")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cryptsetup makes no header for the peer: {}", problem.trim());
    Ok(())
}
