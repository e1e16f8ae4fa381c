//! Commands of the host that manages a controller's volumes.

use sidecore_driver::{NvmeClient, NvmeCommand, admin_opcode};

pub fn run(pf: &mut NvmeClient, command: NvmeCommand, data: &[u8]) -> (u16, u32) {
    let completion = pf.admin().write(command, data).unwrap();
    (completion.status.0 & 0x7FF, completion.result)
}

/// Namespace Management, Create: size in blocks and LBA format.
pub fn create(pf: &mut NvmeClient, blocks: u64, format: u8) -> (u16, u32) {
    let mut data = [0; 4096];
    data[..8].copy_from_slice(&blocks.to_le_bytes());
    data[8..16].copy_from_slice(&blocks.to_le_bytes());
    data[26] = format;
    run(pf, NvmeCommand::new(admin_opcode::NAMESPACE_MANAGEMENT, 0), &data)
}

/// Namespace Management, Delete.
pub fn delete(pf: &mut NvmeClient, namespace: u32) -> u16 {
    let command = NvmeCommand::new(admin_opcode::NAMESPACE_MANAGEMENT, namespace).dword(10, 1);
    run(pf, command, &[0; 4096]).0
}

/// Namespace Attachment: 0 attaches, 1 detaches.
pub fn attachment(pf: &mut NvmeClient, selection: u32, namespace: u32, controllers: &[u16]) -> u16 {
    let mut data = [0; 4096];
    data[..2].copy_from_slice(&(controllers.len() as u16).to_le_bytes());
    for (index, id) in controllers.iter().enumerate() {
        data[2 + index * 2..][..2].copy_from_slice(&id.to_le_bytes());
    }
    let command =
        NvmeCommand::new(admin_opcode::NAMESPACE_ATTACHMENT, namespace).dword(10, selection);
    run(pf, command, &data).0
}

pub fn attach(pf: &mut NvmeClient, namespace: u32, controller: u16) -> u16 {
    attachment(pf, 0, namespace, &[controller])
}

pub fn detach(pf: &mut NvmeClient, namespace: u32, controller: u16) -> u16 {
    attachment(pf, 1, namespace, &[controller])
}

/// Virtualization Management.
pub fn virtualization(pf: &mut NvmeClient, controller: u16, action: u32) -> u16 {
    let command = NvmeCommand::new(admin_opcode::VIRTUALIZATION_MANAGEMENT, 0);
    run(pf, command.dword(10, u32::from(controller) << 16 | action), &[]).0
}

pub fn ids(list: &[u8]) -> Vec<u32> {
    let ids = list.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().unwrap()));
    ids.take_while(|id| *id != 0).collect()
}

/// The allocated namespaces.
pub fn allocated(pf: &mut NvmeClient) -> Vec<u32> {
    ids(&pf.identify(0x10, 0).unwrap()[..])
}

/// The controllers that a namespace is attached to.
pub fn attached(pf: &mut NvmeClient, namespace: u32) -> Vec<u16> {
    let list = pf.identify(0x12, namespace).unwrap();
    let ids = list.chunks_exact(2).map(|id| u16::from_le_bytes(id.try_into().unwrap()));
    let ids: Vec<u16> = ids.collect();
    ids[1..][..usize::from(ids[0])].to_vec()
}

/// The secondary controllers, and whether they are online.
pub fn secondary(pf: &mut NvmeClient) -> Vec<(u16, bool)> {
    let list = pf.identify(0x15, 0).unwrap();
    let entry = |at: usize| (u16::from_le_bytes([list[at], list[at + 1]]), list[at + 4] == 1);
    (1..=usize::from(list[0])).map(|index| entry(index * 32)).collect()
}
