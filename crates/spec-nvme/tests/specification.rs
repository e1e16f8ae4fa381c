//! Numbers for which the machine has no headers, typed from the tables of the specifications.
#![forbid(unsafe_code)]

use sidecore_spec_nvme::command::{self, DatasetRange, sgl};
use sidecore_spec_nvme::identify::{Controller, LbaFormat, Namespace, cns, oacs};
use sidecore_spec_nvme::opcode::{admin, nvm};
use sidecore_spec_nvme::register::{self, cap, cc, csts};
use sidecore_spec_nvme::vfio_user::{
    AccessHeader, Command, DmaMap, DmaUnmap, FLAG_ERROR, FLAG_NO_REPLY, MessageHeader,
    TYPE_COMMAND, TYPE_MASK, TYPE_REPLY, VersionHeader,
};
use sidecore_spec_nvme::{feature, log_page, status};

/// Figure 138: the function in bits 7:2 and the data transfer in bits 1:0 of the combined opcode.
#[test]
fn admin_opcodes() {
    let opcode = |generic: u8, function: u8, transfer: u8| generic << 7 | function << 2 | transfer;
    assert_eq!(admin::DELETE_SUBMISSION_QUEUE, opcode(0, 0b00000, 0b00));
    assert_eq!(admin::CREATE_SUBMISSION_QUEUE, opcode(0, 0b00000, 0b01));
    assert_eq!(admin::GET_LOG_PAGE, opcode(0, 0b00000, 0b10));
    assert_eq!(admin::DELETE_COMPLETION_QUEUE, opcode(0, 0b00001, 0b00));
    assert_eq!(admin::CREATE_COMPLETION_QUEUE, opcode(0, 0b00001, 0b01));
    assert_eq!(admin::IDENTIFY, opcode(0, 0b00001, 0b10));
    assert_eq!(admin::ABORT, opcode(0, 0b00010, 0b00));
    assert_eq!(admin::SET_FEATURES, opcode(0, 0b00010, 0b01));
    assert_eq!(admin::GET_FEATURES, opcode(0, 0b00010, 0b10));
    assert_eq!(admin::ASYNC_EVENT_REQUEST, opcode(0, 0b00011, 0b00));
    assert_eq!(admin::NAMESPACE_MANAGEMENT, opcode(0, 0b00011, 0b01));
    assert_eq!(admin::NAMESPACE_ATTACHMENT, opcode(0, 0b00101, 0b01));
    assert_eq!(admin::KEEP_ALIVE, opcode(0, 0b00110, 0b00));
    assert_eq!(admin::VIRTUALIZATION_MANAGEMENT, opcode(0, 0b00111, 0b00));
    assert_eq!(admin::DOORBELL_BUFFER_CONFIG, opcode(0, 0b11111, 0b00));
}

/// NVM command set 1.0, figure 22, in the same way.
#[test]
fn nvm_opcodes() {
    let opcode = |function: u8, transfer: u8| function << 2 | transfer;
    assert_eq!(nvm::FLUSH, opcode(0b00000, 0b00));
    assert_eq!(nvm::WRITE, opcode(0b00000, 0b01));
    assert_eq!(nvm::READ, opcode(0b00000, 0b10));
    assert_eq!(nvm::WRITE_UNCORRECTABLE, opcode(0b00001, 0b00));
    assert_eq!(nvm::COMPARE, opcode(0b00001, 0b01));
    assert_eq!(nvm::WRITE_ZEROES, opcode(0b00010, 0b00));
    assert_eq!(nvm::DATASET_MANAGEMENT, opcode(0b00010, 0b01));
    assert_eq!(nvm::VERIFY, opcode(0b00011, 0b00));
}

/// Figure 35 and 3.1.3.1 to 3.1.3.6: the first byte of each property, and the first bit of each
/// field.
#[test]
fn properties() {
    use register::{ACQ, AQA, ASQ, CAP, CC, CRTO, CSTS, DOORBELLS, INTMC, INTMS, VS};
    let offsets = [CAP, VS, INTMS, INTMC, CC, CSTS, AQA, ASQ, ACQ, CRTO, DOORBELLS];
    assert_eq!(offsets, [0x0, 0x8, 0xC, 0x10, 0x14, 0x1C, 0x24, 0x28, 0x30, 0x68, 0x1000]);
    assert_eq!(register::VERSION_2_0.to_be_bytes(), [0, 2, 0, 0], "major, minor and tertiary");
    assert_eq!(register::DOORBELL_BYTES, 4);
    assert_eq!((cap::MQES_MASK, cap::CQR), (0xFFFF, 0x1_0000));
    assert_eq!(
        (cap::TO_SHIFT, cap::TO_MILLIS, cap::DSTRD_SHIFT, cap::MPSMIN_SHIFT),
        (24, 500, 32, 48)
    );
    assert_eq!((cap::CSS_NVM, cap::CRMS_CRWMS), (0x20_0000_0000, 0x0800_0000_0000_0000));
    assert_eq!((cc::EN, cc::CSS_SHIFT, cc::MPS_SHIFT, cc::AMS_SHIFT), (1, 4, 7, 11));
    assert_eq!((cc::SHN_SHIFT, cc::SHN_NORMAL, cc::SHN_ABRUPT), (14, 1, 2));
    assert_eq!((cc::IOSQES_SHIFT, cc::IOCQES_SHIFT), (16, 20));
    assert_eq!((csts::RDY, csts::CFS, csts::SHST_SHIFT), (1, 2, 2));
    assert_eq!((csts::SHST_OCCURRING, csts::SHST_COMPLETE), (1, 2));
}

/// 3.3.3.1, figures 91 and 107; NVM command set 1.0, 3.2 and 3.3: the commands' dwords.
#[test]
fn fields_of_commands() {
    assert_eq!((command::COMMAND_BYTES, command::COMPLETION_BYTES), (64, 16));
    assert_eq!((1 << command::COMMAND_BYTES_LOG2, 1 << command::COMPLETION_BYTES_LOG2), (64, 16));
    assert_eq!((command::MAX_ENTRIES, command::BROADCAST_NSID), (65_536, u32::MAX));
    assert_eq!((command::FUSE_SHIFT, command::FUSE_FIRST, command::FUSE_SECOND), (8, 1, 2));
    assert_eq!(
        (command::PSDT_SHIFT, command::PSDT_SGL, command::PSDT_SGL_WITH_METADATA_SEGMENT),
        (14, 1, 2)
    );
    assert_eq!((command::METADATA_POINTER_OFFSET, command::DATA_POINTER_OFFSET), (16, 24));
    assert_eq!((command::PRP_BYTES, command::SGL_DESCRIPTOR_BYTES), (8, 16));
    assert_eq!((sgl::DATA_BLOCK, sgl::BIT_BUCKET, sgl::SEGMENT, sgl::LAST_SEGMENT), (0, 1, 2, 3));
    assert_eq!((command::CONTIGUOUS, command::INTERRUPTS_ENABLED), (1, 2));
    assert_eq!(command::FORCE_UNIT_ACCESS, 0x4000_0000);
    assert_eq!(command::PROTECTION_INFORMATION, 0x3C00_0000);
    assert_eq!(command::DEALLOCATE, 0x0200_0000);
    assert_eq!(command::DIRECTIVE_TYPE, 0x00F0_0000);
    assert_eq!((command::ATTRIBUTE_DEALLOCATE, command::MAX_RANGES), (4, 256));
    let range = DatasetRange { attributes: 1, blocks: 2, lba: 3 };
    assert_eq!(range.encode(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
}

/// Figures 201, 273 and 316, and OACS in figure 275.
#[test]
fn identifiers() {
    use log_page::{COMMANDS_SUPPORTED, FEATURES_SUPPORTED, MANAGEMENT_SUPPORTED};
    assert_eq!(
        (log_page::SUPPORTED_LOG_PAGES, log_page::ERROR_INFORMATION, log_page::HEALTH),
        (0, 1, 2)
    );
    assert_eq!((log_page::FIRMWARE_SLOT, log_page::CHANGED_NAMESPACES), (3, 4));
    assert_eq!((COMMANDS_SUPPORTED, FEATURES_SUPPORTED, MANAGEMENT_SUPPORTED), (5, 18, 19));
    assert_eq!(
        (cns::NAMESPACE, cns::CONTROLLER, cns::ACTIVE_NAMESPACES, cns::NAMESPACE_DESCRIPTORS),
        (0, 1, 2, 3)
    );
    assert_eq!((cns::COMMAND_SET_NAMESPACE, cns::COMMAND_SET_CONTROLLER), (5, 6));
    assert_eq!((cns::COMMAND_SET_ACTIVE_NAMESPACES, cns::INDEPENDENT_NAMESPACE), (7, 8));
    assert_eq!((cns::ALLOCATED_NAMESPACES, cns::ALLOCATED_NAMESPACE), (0x10, 0x11));
    assert_eq!((cns::ATTACHED_CONTROLLERS, cns::CONTROLLERS), (0x12, 0x13));
    assert_eq!((cns::PRIMARY_CAPABILITIES, cns::SECONDARY_CONTROLLERS), (0x14, 0x15));
    assert_eq!(cns::COMMAND_SET_ALLOCATED_NAMESPACES, 0x1A);
    assert_eq!(cns::COMMAND_SET_ALLOCATED_NAMESPACE, 0x1B);
    assert_eq!(
        (feature::ARBITRATION, feature::POWER_MANAGEMENT, feature::TEMPERATURE_THRESHOLD),
        (1, 2, 4)
    );
    assert_eq!(
        (feature::ERROR_RECOVERY, feature::VOLATILE_WRITE_CACHE, feature::NUMBER_OF_QUEUES),
        (5, 6, 7)
    );
    assert_eq!((feature::INTERRUPT_COALESCING, feature::INTERRUPT_VECTOR), (8, 9));
    assert_eq!(
        (feature::WRITE_ATOMICITY, feature::ASYNCHRONOUS_EVENTS, feature::KEEP_ALIVE_TIMER),
        (10, 11, 15)
    );
    assert_eq!((oacs::NAMESPACE_MANAGEMENT, oacs::VIRTUALIZATION_MANAGEMENT), (0x8, 0x80));
    assert_eq!(oacs::DOORBELL_BUFFER_CONFIG, 0x100);
}

/// Figures 96 to 99 and NVM command set 1.0, figure 16: type, code and title.
const STATUSES: &[(u16, u16, &str)] = &[
    (0, 0x00, "Successful Completion"),
    (0, 0x01, "Invalid Command Opcode"),
    (0, 0x02, "Invalid Field in Command"),
    (0, 0x06, "Internal Error"),
    (0, 0x0B, "Invalid Namespace or Format"),
    (0, 0x13, "PRP Offset Invalid"),
    (0, 0x20, "Namespace is Write Protected"),
    (0, 0x80, "LBA Out of Range"),
    (1, 0x00, "Completion Queue Invalid"),
    (1, 0x09, "Invalid Log Page"),
    (1, 0x29, "I/O Command Set Not Supported"),
    (1, 0x80, "Conflicting Attributes"),
    (2, 0x80, "Write Fault"),
    (2, 0x81, "Unrecovered Read Error"),
    (2, 0x85, "Compare Failure"),
    (3, 0x60, "Controller Pathing Error"),
    (3, 0x71, "Command Aborted By Host"),
];

#[test]
fn statuses() {
    for (kind, code, title) in STATUSES {
        let value = kind << status::TYPE_SHIFT | code;
        assert_eq!(status::name(value | status::MORE | status::DO_NOT_RETRY), Some(*title));
    }
    assert_eq!(status::name(0x7FF), None);
    assert_eq!((status::CODE_MASK, status::MORE, status::DO_NOT_RETRY), (0x7FF, 0x2000, 0x4000));
}

/// Figure 275: the first and the last byte of each field, and the value that the test gives to its
/// bytes.
const CONTROLLER_FIGURE: [(usize, usize, u8); 32] = [
    (0, 1, 0x11),
    (2, 3, 0x22),
    (4, 23, 0x33),
    (24, 63, 0x44),
    (64, 71, 0x55),
    (76, 76, 0x66),
    (77, 77, 0x77),
    (78, 79, 0x88),
    (80, 83, 0x99),
    (92, 95, 0xAA),
    (111, 111, 0xBB),
    (256, 257, 0xCC),
    (258, 258, 0xC1),
    (259, 259, 0xC2),
    (260, 260, 0xC3),
    (261, 261, 0xC4),
    (262, 262, 0xC5),
    (266, 267, 0xDD),
    (268, 269, 0xEE),
    (280, 295, 0x12),
    (296, 311, 0x13),
    (320, 321, 0x14),
    (512, 512, 0x15),
    (513, 513, 0x16),
    (516, 519, 0x17),
    (520, 521, 0x18),
    (522, 523, 0x19),
    (525, 525, 0x1A),
    (532, 533, 0x1B),
    (536, 539, 0x1C),
    (540, 543, 0x1D),
    (768, 1023, 0x1E),
];

#[test]
fn the_controllers_structure() {
    let controller = Controller {
        vid: 0x1111,
        ssvid: 0x2222,
        sn: [0x33; 20],
        mn: [0x44; 40],
        fr: [0x55; 8],
        cmic: 0x66,
        mdts: 0x77,
        cntlid: 0x8888,
        ver: 0x9999_9999,
        oaes: 0xAAAA_AAAA,
        cntrltype: 0xBB,
        oacs: 0xCCCC,
        acl: 0xC1,
        aerl: 0xC2,
        frmw: 0xC3,
        lpa: 0xC4,
        elpe: 0xC5,
        wctemp: 0xDDDD,
        cctemp: 0xEEEE,
        tnvmcap: u128::from_ne_bytes([0x12; 16]),
        unvmcap: u128::from_ne_bytes([0x13; 16]),
        kas: 0x1414,
        sqes: 0x15,
        cqes: 0x16,
        nn: 0x1717_1717,
        oncs: 0x1818,
        fuses: 0x1919,
        vwc: 0x1A,
        acwu: 0x1B1B,
        sgls: 0x1C1C_1C1C,
        mnan: 0x1D1D_1D1D,
        subnqn: [0x1E; 256],
    };
    assert_bytes(&controller.encode(), &CONTROLLER_FIGURE);
}

/// NVM command set 1.0, 4.1.5, in the same way.
#[test]
fn the_namespaces_structure() {
    let mut lbaf = [LbaFormat::default(); 64];
    lbaf[0] = LbaFormat { ms: 0x2020, lbads: 0x21, rp: 0x22 };
    lbaf[63] = LbaFormat { ms: 0x2323, lbads: 0x23, rp: 0x23 };
    let namespace = Namespace {
        nsze: 0x1111_1111_1111_1111,
        ncap: 0x2222_2222_2222_2222,
        nuse: 0x3333_3333_3333_3333,
        nsfeat: 0x44,
        nlbaf: 0x55,
        flbas: 0x66,
        dlfeat: 0x77,
        nacwu: 0x8888,
        nvmcap: u128::from_ne_bytes([0x99; 16]),
        npwg: 0xA1A1,
        npwa: 0xA2A2,
        npdg: 0xA3A3,
        npda: 0xA4A4,
        nows: 0xA5A5,
        nsattr: 0xBB,
        nguid: [0xCC; 16],
        eui64: [0xDD; 8],
        lbaf,
    };
    let figure = [
        (0, 7, 0x11),
        (8, 15, 0x22),
        (16, 23, 0x33),
        (24, 24, 0x44),
        (25, 25, 0x55),
        (26, 26, 0x66),
        (33, 33, 0x77),
        (38, 39, 0x88),
        (48, 63, 0x99),
        (64, 65, 0xA1),
        (66, 67, 0xA2),
        (68, 69, 0xA3),
        (70, 71, 0xA4),
        (72, 73, 0xA5),
        (99, 99, 0xBB),
        (104, 119, 0xCC),
        (120, 127, 0xDD),
        (128, 129, 0x20),
        (130, 130, 0x21),
        (131, 131, 0x22),
        (380, 383, 0x23),
    ];
    assert_bytes(&namespace.encode(), &figure);
}

/// Fails unless the bytes are those of the figure, as (first, last, value), and zero elsewhere.
#[track_caller]
fn assert_bytes(bytes: &[u8], figure: &[(usize, usize, u8)]) {
    let mut expected = vec![0; bytes.len()];
    for (first, last, value) in figure {
        expected[*first..=*last].fill(*value);
    }
    for (at, (byte, expected)) in bytes.iter().zip(expected).enumerate() {
        assert_eq!(*byte, expected, "byte {at}");
    }
}

/// vfio-user, "Commands".
#[test]
fn commands_of_vfio_user() {
    let table = [
        "VERSION",
        "DMA_MAP",
        "DMA_UNMAP",
        "DEVICE_GET_INFO",
        "DEVICE_GET_REGION_INFO",
        "DEVICE_GET_REGION_IO_FDS",
        "DEVICE_GET_IRQ_INFO",
        "DEVICE_SET_IRQS",
        "REGION_READ",
        "REGION_WRITE",
        "DMA_READ",
        "DMA_WRITE",
        "DEVICE_RESET",
        "DIRTY_PAGES",
        "REGION_WRITE_MULTI",
        "DEVICE_FEATURE",
        "MIG_DATA_READ",
        "MIG_DATA_WRITE",
    ];
    for (code, name) in (1..).zip(table) {
        assert_eq!(
            (Command::from_code(code).name(), Command::from_code(code).code()),
            (name, code)
        );
    }
    assert_eq!(Command::ALL.len(), table.len());
    assert_eq!(Command::from_code(0), Command::Unknown(0));
}

/// vfio-user, "Header", "VFIO_USER_VERSION", "VFIO_USER_DMA_MAP", "VFIO_USER_DMA_UNMAP" and
/// "VFIO_USER_REGION_READ": the offsets and sizes of the tables.
#[test]
fn layouts_of_vfio_user() {
    let header = MessageHeader { id: 0x0101, command: 0x0202, size_bytes: 3, flags: 4, errno: 5 };
    assert_eq!(header.encode(), [1, 1, 2, 2, 3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0]);
    assert_eq!(
        (TYPE_MASK, TYPE_COMMAND, TYPE_REPLY, FLAG_NO_REPLY, FLAG_ERROR),
        (0xf, 0, 1, 0x10, 0x20)
    );
    assert_eq!(VersionHeader { major: 1, minor: 2 }.encode(), [1, 0, 2, 0]);
    let map = DmaMap { argsz: 1, flags: 2, offset_bytes: 3, address: 4, len_bytes: 5 };
    let table = [(0, 0, 1), (4, 4, 2), (8, 8, 3), (16, 16, 4), (24, 24, 5)];
    assert_bytes(&map.encode(), &table);
    let unmap = DmaUnmap { argsz: 1, flags: 2, address: 3, len_bytes: 4 };
    assert_bytes(&unmap.encode(), &[(0, 0, 1), (4, 4, 2), (8, 8, 3), (16, 16, 4)]);
    let access = AccessHeader { offset_bytes: 1, region: 2, count: 3 };
    assert_bytes(&access.encode(), &[(0, 0, 1), (8, 8, 2), (12, 12, 3)]);
}
