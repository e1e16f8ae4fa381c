//! Tests of the store as a whole.

mod basics;
mod crash;
mod flips;
mod large;
mod model;
mod repair;
mod space;
