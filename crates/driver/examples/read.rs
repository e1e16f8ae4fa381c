//! Reads the start of a vhost-user disk and shows it: `read SOCKET [SECTOR]`.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sidecore_driver::{BlkClient, ClientOptions, Status};
use sidecore_units::Sector;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().context("usage: read SOCKET [SECTOR]")?;
    let sector =
        arguments.next().map_or(Ok(0), |text| text.parse()).context("SECTOR is a number")?;

    let mut client = BlkClient::connect(socket, &ClientOptions::default())?;
    let config = client.config();
    println!(
        "{} sectors, blocks of {} bytes, {} queues",
        config.capacity_sectors, config.block_bytes, config.queues
    );

    let queue = client.queue(0).context("the disk has no queue")?;
    let slot = queue.take_slot().context("the queue has no slot")?;
    queue.submit_read(slot, Sector(sector), 512)?;
    queue.publish()?;
    ensure!(queue.wait(Duration::from_secs(5))?, "the disk does not answer");
    let mut completions = Vec::new();
    queue.poll_completions(&mut completions)?;
    ensure!(completions[0].status == Status::Ok, "the disk says {:?}", completions[0].status);

    let mut data = [0; 512];
    queue.read_data(slot, 0, &mut data);
    for (row, bytes) in data.chunks(16).enumerate() {
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("{:04x}  {}", row * 16, hex.join(" "));
    }
    Ok(())
}
