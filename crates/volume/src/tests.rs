//! Tests of the store as a whole.

mod basics;
mod crash;
mod flips;
mod full;
mod large;
mod log;
mod model;
mod owner;
mod remap;
mod repair;
mod space;
mod usage;
