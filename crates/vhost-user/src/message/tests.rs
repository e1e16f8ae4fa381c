use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::testing::event;

fn parse(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Message, MessageError> {
    let (header, payload) = bytes.split_first_chunk().unwrap();
    Message::parse(Header::parse(header)?, payload, fds)
}

fn fds(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| event()).collect()
}

#[test]
fn a_message_has_the_layout_of_the_specification() {
    let state = VringState { index: 2, num: 256 };
    let message =
        Message::request(Request::SetVringNum, Body::VringState(state), Vec::new()).needing_reply();
    let words = [8_u32, 0x1 | 0x8, 8, 2, 256];
    let expected: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(message.to_bytes(), expected);
    assert_eq!(parse(&expected, Vec::new()).unwrap().body, Body::VringState(state));
}

#[test]
fn a_reply_has_only_the_flag_that_qemu_accepts() {
    let bytes = Message::reply(Request::GetFeatures, Body::U64(1)).to_bytes();
    assert_eq!(bytes[4..8], 0x5_u32.to_ne_bytes());
}

#[test]
fn a_wrong_version_and_an_oversized_payload_are_refused_by_the_header() {
    let header = |flags: u32, size: u32| {
        let words = [1_u32, flags, size].map(u32::to_ne_bytes);
        Header::parse(words.as_flattened().try_into().unwrap())
    };
    let request = Request::GetFeatures;
    assert_eq!(header(0x2, 0), Err(MessageError::Version { request, version: 2 }));
    assert_eq!(header(0x1, 4097), Err(MessageError::Oversized { request, size_bytes: 4097 }));
    assert!(header(0x1, u32::MAX).is_err());
    assert_eq!(header(0x1, 4096).unwrap().payload_bytes, 4096);
}

#[test]
fn a_payload_too_short_or_too_long_is_malformed() {
    let good = Message::request(Request::SetFeatures, Body::U64(0), Vec::new()).to_bytes();
    let malformed =
        |size_bytes| MessageError::Malformed { request: Request::SetFeatures, size_bytes };
    assert_eq!(parse(&good[..19], Vec::new()).unwrap_err(), malformed(7));
    let long = [&good[..], &[0]].concat();
    assert_eq!(parse(&long, Vec::new()).unwrap_err(), malformed(9));
}

#[test]
fn a_memory_table_of_more_than_eight_regions_is_malformed() {
    let region =
        MemoryRegion { guest_address: 0, len_bytes: 1, user_address: 0, file_offset_bytes: 0 };
    let message = |count| {
        Message::request(Request::SetMemTable, Body::MemoryTable(vec![region; count]), Vec::new())
    };
    assert!(parse(&message(8).to_bytes(), fds(8)).is_ok());
    assert!(matches!(parse(&message(9).to_bytes(), fds(8)), Err(MessageError::Malformed { .. })));
    // A count larger than the payload.
    let mut bytes = message(2).to_bytes();
    bytes[HEADER_BYTES] = 3;
    assert!(matches!(parse(&bytes, fds(3)), Err(MessageError::Malformed { .. })));
}

#[test]
fn every_message_has_its_number_of_descriptors() {
    let region =
        MemoryRegion { guest_address: 0, len_bytes: 1, user_address: 0, file_offset_bytes: 0 };
    let cases = [
        (Request::SetVringKick, Body::U64(3), 1..=1),
        (Request::SetVringCall, Body::U64(NO_FD), 0..=0),
        (Request::SetMemTable, Body::MemoryTable(vec![region; 2]), 2..=2),
        (Request::AddMemReg, Body::MemoryRegion(region), 1..=1),
        (Request::RemMemReg, Body::MemoryRegion(region), 0..=1),
        (Request::SetBackendReqFd, Body::Empty, 1..=1),
        (Request::SetLogBase, Body::Log(Log { len_bytes: 8, file_offset_bytes: 0 }), 1..=1),
        (Request::SetLogFd, Body::Empty, 1..=1),
        (Request::GetFeatures, Body::Empty, 0..=0),
        // The server does not know the number for a request that it does not serve.
        (Request::SetInflightFd, Body::Other(vec![1]), 0..=8),
        (Request::Unknown(99), Body::Other(Vec::new()), 0..=8),
    ];
    for (request, body, good) in cases {
        let bytes = Message::request(request, body, Vec::new()).to_bytes();
        for count in 0..=3 {
            let parsed = parse(&bytes, fds(count));
            assert_eq!(parsed.is_ok(), good.contains(&count), "{request} with {count}: {parsed:?}");
        }
    }
}

#[test]
fn a_configuration_access_may_be_longer_than_its_size() {
    let config = ConfigSpace { offset_bytes: 32, flags: 0, data: vec![1] };
    let mut bytes =
        Message::request(Request::SetConfig, Body::Config(config.clone()), Vec::new()).to_bytes();
    bytes.extend_from_slice(&[0; MAX_CONFIG_BYTES - 1]);
    assert_eq!(parse(&bytes, Vec::new()).unwrap().body, Body::Config(config));
    // But never shorter than its size, or above the limit.
    bytes[HEADER_BYTES + 4..][..4].copy_from_slice(&257_u32.to_ne_bytes());
    assert!(parse(&bytes, Vec::new()).is_err());
    bytes[HEADER_BYTES + 4..][..4].copy_from_slice(&256_u32.to_ne_bytes());
    assert!(parse(&bytes, Vec::new()).is_ok());
    bytes.pop();
    assert!(parse(&bytes, Vec::new()).is_err());
}

#[test]
fn requests_keep_their_code_and_have_a_name() {
    for code in 0..64 {
        assert_eq!(Request::from_code(code).code(), code);
    }
    assert_eq!(Request::SetMemTable.to_string(), "SET_MEM_TABLE");
    assert_eq!(Request::from_code(99).to_string(), "request 99");
}

fn region() -> impl Strategy<Value = MemoryRegion> {
    any::<[u64; 4]>().prop_map(|[guest_address, len_bytes, user_address, file_offset_bytes]| {
        MemoryRegion { guest_address, len_bytes, user_address, file_offset_bytes }
    })
}

fn request_and_body() -> impl Strategy<Value = (Request, Body)> {
    let address = any::<(u32, u32, [u64; 4])>().prop_map(
        |(index, flags, [descriptor, used, available, log])| {
            Body::VringAddress(VringAddress { index, flags, descriptor, used, available, log })
        },
    );
    let config = (any::<(u32, u32)>(), vec(any::<u8>(), 0..=MAX_CONFIG_BYTES)).prop_map(
        |((offset_bytes, flags), data)| Body::Config(ConfigSpace { offset_bytes, flags, data }),
    );
    prop_oneof![
        Just((Request::GetFeatures, Body::Empty)),
        any::<u64>().prop_map(|value| (Request::SetFeatures, Body::U64(value))),
        any::<(u32, u32)>().prop_map(|(index, num)| (
            Request::SetVringBase,
            Body::VringState(VringState { index, num })
        )),
        address.prop_map(|body| (Request::SetVringAddr, body)),
        vec(region(), 0..=MAX_FDS)
            .prop_map(|regions| (Request::SetMemTable, Body::MemoryTable(regions))),
        region().prop_map(|region| (Request::RemMemReg, Body::MemoryRegion(region))),
        any::<[u64; 2]>().prop_map(|[len_bytes, file_offset_bytes]| (
            Request::SetLogBase,
            Body::Log(Log { len_bytes, file_offset_bytes })
        )),
        config.prop_map(|body| (Request::GetConfig, body)),
        (45_u32.., vec(any::<u8>(), 0..100))
            .prop_map(|(code, payload)| (Request::Unknown(code), Body::Other(payload))),
    ]
}

proptest! {
    #[test]
    fn a_written_message_is_read_back((request, body) in request_and_body(), need_reply: bool) {
        let count = match &body {
            Body::MemoryTable(regions) => regions.len(),
            Body::Log(_) => 1,
            _ => 0,
        };
        let mut message = Message::request(request, body.clone(), Vec::new());
        message.flags.need_reply = need_reply;
        let parsed = parse(&message.to_bytes(), fds(count)).unwrap();
        prop_assert_eq!(parsed.request, request);
        prop_assert_eq!(parsed.flags, message.flags);
        prop_assert_eq!(parsed.body, body);
    }

    #[test]
    fn arbitrary_bytes_are_a_message_or_an_error(
        code in 0_u32..48,
        flags: u32,
        payload in vec(any::<u8>(), 0..400),
        fd_count in 0_usize..3,
    ) {
        let header = [code, flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
        let bytes = [header, payload].concat();
        if let Ok(message) = parse(&bytes, fds(fd_count)) {
            prop_assert_eq!(message.request.code(), code);
            // A parsed message can be written again.
            prop_assert!(message.to_bytes().len() <= bytes.len());
        }
    }
}
