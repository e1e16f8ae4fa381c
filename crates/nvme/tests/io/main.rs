//! I/O queues from doorbell to store and back: every command, several queues, and guests that lie.

mod commands;
mod control;
mod errors;
mod fused;
mod handover;
mod hostile;
mod interrupts;
mod queues;
mod rig;
mod shadow;
mod threads;
