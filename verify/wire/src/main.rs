//! `sidecore-wire`: wires with faults between interfaces, until standard input ends.
#![forbid(unsafe_code)]

use std::io::BufRead as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use clap::Parser;
use sidecore_wire::{Chances, Handle, Order, Wires};

const AFTER_HELP: &str = "\
An end of a wire has the address of the station behind the other end. Orders come by standard input,
a line each, and its end ends the program:
  chances LOSS DOUBLING REORDERING DAMAGE   percents, from now on
  counts                                    print the counts of each wire, a line of JSON each
  cut, mend                                 carry nothing, carry frames again

Packets of several frames (`segmentation_offload`) are cut into segments, as a network card does.
They reach an end whose MTU is 65535: `ip link set dev a mtu 65535`; to others they are too long.

Example, between two veth interfaces whose other ends are the stations':
  sidecore-wire --between a:b --loss 10 --doubling 10 --reordering 10
";

/// Carries frames between interfaces, and loses, doubles, reorders and damages some.
#[derive(Parser)]
#[command(name = "sidecore-wire", after_help = AFTER_HELP)]
struct Arguments {
    /// Both ends of a wire; may be given several times.
    #[arg(long, required = true, value_name = "LEFT:RIGHT")]
    between: Vec<String>,
    /// The protocol of the frames that are carried; others are not.
    #[arg(long, default_value = "0x88b5", value_parser = ethertype)]
    ethertype: u16,
    /// The same seed decides alike about the same frames; by default another each time.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    chances: Chances,
}

fn ethertype(text: &str) -> Result<u16> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u16::from_str_radix(digits, 16).with_context(|| format!("`{text}` is no ethertype: use 0x88b5"))
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let between = arguments.between.iter().map(|pair| {
        let ends = pair.split_once(':').filter(|(left, right)| left != right);
        let (left, right) = ends.with_context(|| format!("`{pair}`: use LEFT:RIGHT"))?;
        Ok([left.to_owned(), right.to_owned()])
    });
    let between: Vec<[String; 2]> = between.collect::<Result<_>>()?;
    let seed = arguments.seed.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        now.as_nanos() as u64
    });
    let mut wires = Wires::open(&between, arguments.ethertype, seed, arguments.chances)?;
    let handles = wires.handles();
    println!("ready: {} wires, seed {seed}", handles.len());
    let end = Arc::new(AtomicBool::new(false));
    let orders = {
        let (handles, end) = (handles.clone(), Arc::clone(&end));
        std::thread::spawn(move || {
            let outcome = obey(&handles);
            end.store(true, Ordering::Relaxed);
            outcome
        })
    };
    // If this fails, the other thread still waits for orders, and ends with the process.
    wires.run(&end)?;
    orders.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    print(&handles)
}

/// Executes orders until standard input ends.
fn obey(handles: &[Handle]) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line.context("cannot read orders")?;
        match line.parse()? {
            Order::Chances(chances) => {
                handles.iter().for_each(|handle| handle.set_chances(chances));
            }
            Order::Counts => print(handles)?,
            Order::Cut => handles.iter().for_each(Handle::cut),
            Order::Mend => handles.iter().for_each(Handle::mend),
        }
    }
    Ok(())
}

fn print(handles: &[Handle]) -> Result<()> {
    for handle in handles {
        println!("{}", serde_json::to_string(&handle.counts())?);
    }
    Ok(())
}
