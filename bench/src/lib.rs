//! The experiments: this project's claims about speed, measured beside its peers and beside the
//! machine's floors.
//!
//! Every comparison is interleaved (ours, theirs, ours, theirs ...) through one client, and given
//! as the median of the rounds' ratios with their spread. On virtual machines the two cores move
//! apart and together again during a measurement, which by itself changes a result threefold: each
//! run is therefore taken between two measurements of the round trip of a cache line, and counts
//! only if both were short, and if no other work took the cores ([`cores`]).
//!
//! The results are lines of JSON ([`record`]), tables in the documentation ([`publish`]) and a plot
//! ([`plot`]).
#![forbid(unsafe_code)]

pub mod against;
pub mod bounds;
pub mod cells;
pub mod control;
pub mod cores;
pub mod experiment;
pub mod fill;
pub mod floors;
pub mod fresh_writes;
pub mod guest_cost;
pub mod host_disk;
pub mod huge_pages;
pub mod lines;
pub mod load;
pub mod local_block;
pub mod nested;
pub mod net_switch;
pub mod nvme_vf;
pub mod peer;
pub mod plot;
pub mod process;
pub mod publish;
pub mod record;
pub mod remote_block;
pub mod remote_figures;
pub mod requests;
pub mod rounds;
pub mod runs;
pub mod shares;
pub mod sidecored;
pub mod stages;
pub mod stats;
pub mod translation;
pub mod turns;
pub mod verdicts;
pub mod workers;

pub use sidecore_kit::interrupt as stop;
