-- SPDX-License-Identifier: Apache-2.0
--
-- Wireshark's dissector of Sidecore's remote channel, version 1, on Ethernet, in UDP,
-- and of several frames behind a fake TCP header.
--
-- It is written from docs/vrio.md alone, and tables stand in the order of that page. To use it:
--
--     tshark -X lua_script:sidecore-vrio.lua -i eth1 -Y 'vrio.kind == 2 && vrio.status != 0'
--
-- or copy it to the directory of personal plugins (Help > About Wireshark > Folders).
--
-- A sealed frame shows its header and body; its payload stays closed, because the dissector has no
-- keys. No frame says whether it is sealed: the preference "Seal" does, or else the tag, which is
-- behind the payload of a sealed frame where a plain one ends.

local ETHERTYPE = 0x88B5
local PORT = 34997
local VERSION = 1
local HEADER_BYTES = 30
local BODY_BYTES = 52
-- Of a part of a BUNDLE, in front of its body.
local PART_BYTES = 4
local TAG_BYTES = 16
-- An Ethernet frame is padded to this size, of which 14 bytes are Ethernet's header.
local ETHERNET_PAYLOAD_MIN = 60 - 14

local vrio = Proto("vrio", "Sidecore Remote Channel")

local KINDS = {
    [1] = "REQUEST", [2] = "ANSWER", [3] = "BUSY", [4] = "HELLO", [5] = "CHALLENGE",
    [6] = "WELCOME", [7] = "LIST", [8] = "DEVICE", [9] = "ATTACH", [10] = "ATTACHED",
    [11] = "PING", [12] = "PONG", [13] = "ENDING", [14] = "BUNDLE", [15] = "PACKET",
}
local TYPES = { [0] = "IN", [1] = "OUT", [4] = "FLUSH", [11] = "DISCARD", [13] = "WRITE_ZEROES" }
local STATUSES = {
    [0] = "OK", [1] = "IOERR", [2] = "UNSUPP",
    [0x80] = "no space", [0x81] = "read-only", [0x82] = "out of bounds",
}
local STATES = { [0] = "none", [1] = "segments are missing", [2] = "the store has the request" }
local HANDSHAKES = { [0] = "none", [1] = "Noise" }
local CODES = {
    [1] = "closed", [2] = "unknown session", [3] = "unknown client", [4] = "no common version",
    [5] = "another epoch of a device",
}

local OFFLOADS = { [0] = "none", [1] = "TCP/IPv4", [4] = "TCP/IPv6", [5] = "UDP" }

local HEX, DEC = base.HEX, base.DEC

local f = {
    version = ProtoField.uint8("vrio.version", "Version", DEC),
    kind = ProtoField.uint8("vrio.kind", "Kind", DEC, KINDS),
    session = ProtoField.uint64("vrio.session", "Session", HEX),
    counter = ProtoField.uint64("vrio.counter", "Counter", DEC),
    incarnation = ProtoField.uint64("vrio.incarnation", "Incarnation", HEX),
    phase = ProtoField.uint8("vrio.phase", "Phase", HEX),
    phase_key = ProtoField.bool("vrio.phase.key", "Key phase", 8, nil, 0x01),
    queue = ProtoField.uint8("vrio.queue", "Queue of the receiver", DEC),
    payload_bytes = ProtoField.uint16("vrio.payload_bytes", "Payload size", DEC),

    part_kind = ProtoField.uint8("vrio.part.kind", "Kind of the part", DEC, KINDS),
    part_payload_bytes = ProtoField.uint16(
        "vrio.part.payload_bytes", "Payload size of the part", DEC),

    device = ProtoField.uint16("vrio.device", "Device", DEC),
    slot = ProtoField.uint16("vrio.slot", "Slot", DEC),
    epoch = ProtoField.uint64("vrio.epoch", "Epoch", DEC),
    sequence = ProtoField.uint32("vrio.sequence", "Sequence", DEC),
    attempt = ProtoField.uint16("vrio.attempt", "Attempt", DEC),
    flags = ProtoField.uint16("vrio.flags", "Flags", HEX),
    fua = ProtoField.bool("vrio.flags.fua", "FUA", 16, nil, 0x0001),
    ask = ProtoField.bool("vrio.flags.ask", "ASK", 16, nil, 0x0002),
    replay = ProtoField.bool("vrio.flags.replay", "REPLAY", 16, nil, 0x0004),
    offset_bytes = ProtoField.uint32("vrio.offset_bytes", "Offset", DEC),
    len_bytes = ProtoField.uint32("vrio.len_bytes", "Length of the data", DEC),
    wanted = ProtoField.uint64("vrio.wanted", "Wanted segments", HEX),
    type = ProtoField.uint32("vrio.type", "Type", DEC, TYPES),
    header_reserved = ProtoField.uint32("vrio.header_reserved", "Reserved", HEX),
    sector = ProtoField.uint64("vrio.sector", "Sector", DEC),
    range_sector = ProtoField.uint64("vrio.range.sector", "Sector of the range", DEC),
    range_sectors = ProtoField.uint32("vrio.range.sectors", "Sectors of the range", DEC),
    range_flags = ProtoField.uint32("vrio.range.flags", "Flags of the range", HEX),

    segments = ProtoField.uint64("vrio.segments", "Missing segments", HEX),
    status = ProtoField.uint8("vrio.status", "Status", HEX, STATUSES),
    state = ProtoField.uint8("vrio.state", "State", DEC, STATES),
    slot_limit = ProtoField.uint16("vrio.slot_limit", "Slot limit", DEC),
    held_ns = ProtoField.uint32("vrio.held_ns", "Held (ns)", DEC),
    devices_version = ProtoField.uint32("vrio.devices_version", "Version of the devices", DEC),
    request_in = ProtoField.framenum("vrio.request_in", "Request in", base.NONE, frametype.REQUEST),
    time = ProtoField.relative_time("vrio.time", "Time since the request"),

    packet_sequence = ProtoField.uint64("vrio.packet.sequence", "Sequence of the packet", DEC),
    packet_bytes = ProtoField.uint32("vrio.packet.len_bytes", "Length of the packet", DEC),
    packet_flags = ProtoField.uint8("vrio.packet.flags", "Flags of the packet", HEX),
    packet_partial = ProtoField.bool(
        "vrio.packet.flags.partial", "Partial checksum", 8, nil, 0x01),
    packet_valid = ProtoField.bool("vrio.packet.flags.valid", "Verified checksum", 8, nil, 0x02),
    packet_offload = ProtoField.uint8(
        "vrio.packet.gso_type", "Segmentation", DEC, OFFLOADS, 0x7f),
    packet_headers = ProtoField.uint16("vrio.packet.hdr_len", "Bytes of headers", DEC),
    packet_part = ProtoField.uint16("vrio.packet.gso_size", "Bytes of each part", DEC),
    packet_start = ProtoField.uint16("vrio.packet.csum_start", "Checksum from", DEC),
    packet_place = ProtoField.uint16("vrio.packet.csum_offset", "Checksum at", DEC),
    packet_buffers = ProtoField.uint16("vrio.packet.num_buffers", "Buffers", DEC),

    client = ProtoField.bytes("vrio.client", "Client"),
    life = ProtoField.uint64("vrio.life", "Life", HEX),
    number = ProtoField.uint64("vrio.number", "Number", DEC),
    challenged_ns = ProtoField.uint64("vrio.challenged_ns", "Challenged at (ns)", DEC),
    cookie = ProtoField.uint64("vrio.cookie", "Cookie", HEX),
    handshake = ProtoField.uint8("vrio.handshake", "Handshake", DEC, HANDSHAKES),
    message_bytes = ProtoField.uint16("vrio.message_bytes", "Size of the message", DEC),
    message = ProtoField.bytes("vrio.message", "Sealed message"),
    message_life = ProtoField.uint64("vrio.message.life", "Life", HEX),
    message_number = ProtoField.uint64("vrio.message.number", "Number", DEC),
    message_cookie = ProtoField.uint64("vrio.message.cookie", "Cookie", HEX),
    message_incarnation = ProtoField.uint64("vrio.message.incarnation", "Incarnation", HEX),
    features = ProtoField.uint64("vrio.features", "Features", HEX),
    bundles = ProtoField.bool("vrio.features.bundles", "Bundles", 64, nil, 0x01),
    packets = ProtoField.bool("vrio.features.packets", "Packets", 64, nil, 0x02),
    client_queue = ProtoField.uint8("vrio.client_queue", "Queue of the client", DEC),
    session_queue = ProtoField.uint8("vrio.session_queue", "Queue of the session", DEC),
    version_min = ProtoField.uint8("vrio.version_min", "Oldest version", DEC),
    version_max = ProtoField.uint8("vrio.version_max", "Newest version", DEC),
    frame_bytes = ProtoField.uint32("vrio.frame_bytes", "Frame size", DEC),
    receive_frames = ProtoField.uint32("vrio.receive_frames", "Receive ring", DEC),
    slots = ProtoField.uint16("vrio.slots", "Slots", DEC),
    new_session = ProtoField.uint64("vrio.new_session", "New session", HEX),
    session_version = ProtoField.uint8("vrio.session_version", "Version of the session", DEC),

    index = ProtoField.uint16("vrio.index", "Index", DEC),
    count = ProtoField.uint16("vrio.count", "Count", DEC),
    list_version = ProtoField.uint32("vrio.list_version", "Version of the list", DEC),
    device_flags = ProtoField.uint32("vrio.device_flags", "Device flags", HEX),
    present = ProtoField.bool("vrio.device_flags.present", "Present", 32, nil, 0x01),
    read_only = ProtoField.bool("vrio.device_flags.read_only", "Read-only", 32, nil, 0x02),
    cache = ProtoField.bool("vrio.device_flags.cache", "Volatile cache", 32, nil, 0x04),
    discard = ProtoField.bool("vrio.device_flags.discard", "Discard", 32, nil, 0x08),
    zeros = ProtoField.bool(
        "vrio.device_flags.zeros", "Discarded blocks read as zeros", 32, nil, 0x10),
    write_zeros = ProtoField.bool(
        "vrio.device_flags.write_zeros", "Write of zeros", 32, nil, 0x20),
    nic = ProtoField.bool("vrio.device_flags.nic", "NIC", 32, nil, 0x40),
    link_up = ProtoField.bool("vrio.device_flags.link_up", "Link is up", 32, nil, 0x80),
    mac = ProtoField.ether("vrio.mac", "Address"),
    mtu = ProtoField.uint16("vrio.mtu", "MTU", DEC),
    capacity_bytes = ProtoField.uint64("vrio.capacity_bytes", "Capacity", DEC),
    block_bytes = ProtoField.uint32("vrio.block_bytes", "Block size", DEC),
    physical_block_bytes = ProtoField.uint32(
        "vrio.physical_block_bytes", "Physical block size", DEC),
    name = ProtoField.string("vrio.name", "Name", base.UNICODE),
    serial = ProtoField.string("vrio.serial", "Serial", base.UNICODE),

    sent_at = ProtoField.uint64("vrio.sent_at", "Sent at", HEX),
    round_trip_ns = ProtoField.uint32("vrio.round_trip_ns", "Round trip (ns)", DEC),
    acknowledge_ns = ProtoField.uint32("vrio.acknowledge_ns", "BUSY after (ns)", DEC),
    code = ProtoField.uint16("vrio.code", "Code", DEC, CODES),

    data = ProtoField.bytes("vrio.data", "Data"),
    sealed = ProtoField.bytes("vrio.sealed", "Sealed payload"),
    tag = ProtoField.bytes("vrio.tag", "Tag"),
    padding = ProtoField.bytes("vrio.padding", "Padding of the link"),
}
vrio.fields = f

local function complaint(name, text, severity)
    return ProtoExpert.new("vrio.expert." .. name, text, expert.group.MALFORMED, severity)
end

local e = {
    truncated = complaint("truncated", "The frame is truncated", expert.severity.ERROR),
    version = complaint("version", "Unknown version", expert.severity.ERROR),
    kind = complaint("kind", "Unknown kind", expert.severity.ERROR),
    payload = complaint("payload", "A payload of the wrong size", expert.severity.ERROR),
    part = complaint("part", "A part that is none", expert.severity.ERROR),
    counter = complaint("counter", "A counter outside of sessions, or none inside",
        expert.severity.WARN),
    reserved = complaint("reserved", "Reserved bytes are not 0", expert.severity.NOTE),
    padding = complaint("padding", "Bytes behind the frame, which are no padding of Ethernet's",
        expert.severity.WARN),
}
vrio.experts = e

local SEAL_AUTO, SEAL_NONE, SEAL_TAG = 1, 2, 3
local SEAL_ABOUT = "Whether payloads are sealed, with a tag behind them"
vrio.prefs.seal = Pref.enum("Seal", SEAL_AUTO, SEAL_ABOUT, {
    { 1, "By the size of the frame", SEAL_AUTO },
    { 2, "None", SEAL_NONE },
    { 3, "16 bytes", SEAL_TAG },
}, false)

-- The layouts of payloads: offset, size, field, or offset and size of reserved bytes.
local LAYOUTS = {
    LIST = { { 0, 2, f.index }, { 2, 6 } },
    DEVICE = {
        { 0, 2, f.device }, { 2, 2, f.index }, { 4, 2, f.count }, { 6, 2 },
        { 8, 4, f.list_version }, { 12, 4, f.device_flags }, { 16, 8, f.epoch },
        { 24, 8, f.capacity_bytes }, { 32, 4, f.block_bytes }, { 36, 4, f.physical_block_bytes },
        { 40, 64, f.name }, { 104, 20, f.serial }, { 124, 12 },
    },
    ATTACH = { { 0, 64, f.name } },
    PING = { { 0, 8, f.sent_at }, { 8, 4, f.round_trip_ns }, { 12, 12 } },
    PONG = {
        { 0, 8, f.sent_at }, { 8, 4, f.held_ns }, { 12, 4, f.devices_version },
        { 16, 2, f.slot_limit }, { 18, 2 }, { 20, 4, f.acknowledge_ns },
    },
    ENDING = { { 0, 8, f.life }, { 8, 8, f.number }, { 16, 2, f.code }, { 18, 6 } },
}
LAYOUTS.ATTACHED = LAYOUTS.DEVICE
-- A DEVICE or ATTACHED that is a NIC.
local NIC = {
    { 0, 2, f.device }, { 2, 2, f.index }, { 4, 2, f.count }, { 6, 2 },
    { 8, 4, f.list_version }, { 12, 4, f.device_flags }, { 16, 8, f.epoch },
    { 24, 6, f.mac }, { 30, 2, f.mtu }, { 32, 8 }, { 40, 64, f.name }, { 104, 32 },
}

-- The clear part of HELLO and WELCOME, and all of a CHALLENGE.
local GREETING_BYTES = 40
local GREETING = {
    { 0, 8, f.life }, { 8, 8, f.number }, { 16, 8, f.challenged_ns }, { 24, 8, f.cookie },
    { 32, 1, f.handshake }, { 33, 1, f.client_queue }, { 34, 2, f.message_bytes }, { 36, 4 },
}
-- The messages behind it, without a handshake.
local MESSAGE_BYTES = 64
local MESSAGES = {
    HELLO = {
        { 0, 16, f.client }, { 16, 8, f.message_life }, { 24, 8, f.message_number },
        { 32, 8, f.features }, { 40, 4, f.frame_bytes }, { 44, 4, f.receive_frames },
        { 48, 2, f.slots }, { 50, 1, f.session_queue }, { 51, 1, f.version_min },
        { 52, 1, f.version_max }, { 53, 3 }, { 56, 8, f.message_cookie },
    },
    WELCOME = {
        { 0, 8, f.message_life }, { 8, 8, f.message_number }, { 16, 8, f.new_session },
        { 24, 8, f.message_incarnation }, { 32, 8, f.features }, { 40, 4, f.frame_bytes },
        { 44, 4, f.devices_version }, { 48, 2, f.slots }, { 50, 2, f.slot_limit },
        { 52, 1, f.session_version }, { 53, 1, f.session_queue }, { 54, 10 },
    },
}

-- The size of a control message, and whether it may be padded further, with zeros.
local SIZES = {
    HELLO = { 40, true }, CHALLENGE = { 40 }, WELCOME = { 40, true }, LIST = { 8 },
    DEVICE = { 136 }, ATTACH = { 64 }, ATTACHED = { 136 }, PING = { 24, true },
    PONG = { 24, true }, ENDING = { 24 },
}
-- Kinds outside of sessions. An ENDING can be both.
local OUTSIDE = { HELLO = true, CHALLENGE = true, WELCOME = true }
local WITH_BODY = { REQUEST = true, ANSWER = true, BUSY = true, PACKET = true }

local REQUEST_BODY = {
    { 0, 2, f.device }, { 2, 2, f.slot }, { 4, 8, f.epoch }, { 12, 4, f.sequence },
    { 16, 2, f.attempt }, { 18, 2, f.flags }, { 20, 4, f.offset_bytes }, { 24, 4, f.len_bytes },
    { 28, 8, f.wanted }, { 36, 4, f.type }, { 40, 4, f.header_reserved }, { 44, 8, f.sector },
}
local ANSWER_BODY = {
    { 0, 2, f.device }, { 2, 2, f.slot }, { 4, 8, f.epoch }, { 12, 4, f.sequence },
    { 16, 2, f.attempt }, { 18, 2 }, { 20, 4, f.offset_bytes }, { 24, 4, f.len_bytes },
    { 28, 8, f.segments }, { 36, 1, f.status }, { 37, 1, f.state }, { 38, 2, f.slot_limit },
    { 40, 4, f.held_ns }, { 44, 4, f.devices_version }, { 48, 4 },
}
local PACKET_BODY = {
    { 0, 2, f.device }, { 2, 2 }, { 4, 8, f.epoch }, { 12, 8, f.packet_sequence },
    { 20, 4, f.offset_bytes }, { 24, 4, f.packet_bytes }, { 28, 24 },
}
-- The virtio header of a packet.
local PACKET_HEADER = {
    { 0, 1, f.packet_flags }, { 1, 1, f.packet_offload }, { 2, 2, f.packet_headers },
    { 4, 2, f.packet_part }, { 6, 2, f.packet_start }, { 8, 2, f.packet_place },
    { 10, 2, f.packet_buffers },
}
local PACKET_HEADER_BYTES = 12
-- The first bytes of a part of a BUNDLE.
local PART = { { 0, 1, f.part_kind }, { 1, 1 }, { 2, 2, f.part_payload_bytes } }
-- The range of a DISCARD or WRITE_ZEROES.
local RANGE = { { 0, 8, f.range_sector }, { 8, 4, f.range_sectors }, { 12, 4, f.range_flags } }

-- The bits of fields that have some.
local BITS = {
    [f.phase] = { f.phase_key },
    [f.flags] = { f.fua, f.ask, f.replay },
    [f.features] = { f.bundles, f.packets },
    [f.device_flags] = {
        f.present, f.read_only, f.cache, f.discard, f.zeros, f.write_zeros, f.nic, f.link_up,
    },
    [f.packet_flags] = { f.packet_partial, f.packet_valid },
}
-- Texts end with the first zero; bytes have no order.
local TEXTS = { [f.name] = true, [f.serial] = true }
local BYTES = { [f.client] = true, [f.mac] = true }

-- The first frame of each request of this capture, by session, slot and sequence.
local requests = {}

function vrio.init()
    requests = {}
end

local function is_zero(range)
    local bytes = range:bytes()
    for at = 0, bytes:len() - 1 do
        if bytes:get_index(at) ~= 0 then return false end
    end
    return true
end

-- The text of a field, which ends with the field or with the first zero.
local function text(range)
    local bytes = range:bytes()
    local len = 0
    while len < bytes:len() and bytes:get_index(len) ~= 0 do len = len + 1 end
    return len > 0 and range:range(0, len):string(ENC_UTF_8) or ""
end

local function add_reserved(tree, range)
    if range:len() > 0 and not is_zero(range) then
        tree:add_proto_expert_info(e.reserved,
            string.format("%d reserved bytes at %d are not 0", range:len(), range:offset()))
    end
end

local function add(tree, field, range)
    if TEXTS[field] then
        tree:add(field, range, text(range))
    elseif BYTES[field] then
        tree:add(field, range)
    else
        local item = tree:add_le(field, range)
        for _, bit in ipairs(BITS[field] or {}) do item:add_le(bit, range) end
    end
end

-- Adds the fields of a layout, which the caller has checked to lie within `range`.
local function add_layout(tree, layout, range)
    for _, entry in ipairs(layout) do
        local part = range:range(entry[1], entry[2])
        if entry[3] then add(tree, entry[3], part) else add_reserved(tree, part) end
    end
end

-- The size of the tag behind a payload, behind which the frame has `behind` bytes. The
-- smallest frame has 38 bytes, so padding of Ethernet's is shorter than a tag.
local function tag_bytes(behind, is_outside)
    if is_outside or vrio.prefs.seal == SEAL_NONE then return 0 end
    if vrio.prefs.seal == SEAL_TAG then return TAG_BYTES end
    return behind >= TAG_BYTES and TAG_BYTES or 0
end

local function add_header(tree, tvb)
    local header = tree:add(vrio, tvb:range(0, HEADER_BYTES), "Header")
    add(header, f.version, tvb:range(0, 1))
    add(header, f.kind, tvb:range(1, 1))
    add(header, f.session, tvb:range(2, 8))
    add(header, f.counter, tvb:range(10, 8))
    add(header, f.incarnation, tvb:range(18, 8))
    add(header, f.phase, tvb:range(26, 1))
    add(header, f.queue, tvb:range(27, 1))
    add(header, f.payload_bytes, tvb:range(28, 2))
end

local function request_key(session, body)
    return string.format("%s/%d/%d",
        session, body:range(2, 2):le_uint(), body:range(12, 4):le_uint())
end

local function request_line(pinfo, session, body, payload_bytes)
    local key = request_key(session, body)
    if not pinfo.visited and not requests[key] then
        requests[key] = { frame = pinfo.number, time = pinfo.abs_ts }
    end
    local kind = body:range(36, 4):le_uint()
    local line = string.format("%s dev %d slot %d seq %d", TYPES[kind] or ("type " .. kind),
        body:range(0, 2):le_uint(), body:range(2, 2):le_uint(), body:range(12, 4):le_uint())
    if body:range(16, 2):le_uint() > 0 then
        line = line .. string.format(" attempt %d", body:range(16, 2):le_uint())
    end
    return line .. string.format(" sector %s len %d, %d bytes at %d",
        tostring(body:range(44, 8):le_uint64()), body:range(24, 4):le_uint(), payload_bytes,
        body:range(20, 4):le_uint())
end

local function answer_line(pinfo, tree, session, body, payload_bytes)
    local request = requests[request_key(session, body)]
    if request then
        tree:add(f.request_in, request.frame):set_generated()
        local since = pinfo.abs_ts - request.time
        local seconds = math.floor(since)
        local time = NSTime.new(seconds, math.floor((since - seconds) * 1e9 + 0.5))
        tree:add(f.time, time):set_generated()
    end
    local status, state = body:range(36, 1):uint(), body:range(37, 1):uint()
    local outcome = STATUSES[status] or string.format("status 0x%02x", status)
    if state ~= 0 then outcome = STATES[state] or ("state " .. state) end
    return string.format("dev %d slot %d seq %d: %s, %d bytes at %d",
        body:range(0, 2):le_uint(), body:range(2, 2):le_uint(), body:range(12, 4):le_uint(),
        outcome, payload_bytes, body:range(20, 4):le_uint())
end

local function packet_line(body, payload_bytes)
    return string.format("dev %d seq %s len %d, %d bytes at %d",
        body:range(0, 2):le_uint(), tostring(body:range(12, 8):le_uint64()),
        body:range(24, 4):le_uint(), payload_bytes, body:range(20, 4):le_uint())
end

-- Adds the payload of a PACKET: the first segment begins with the virtio header.
local function add_packet(tree, body, payload)
    local is_first = body:range(20, 4):le_uint() == 0
    if not is_first or payload:len() <= PACKET_HEADER_BYTES then
        tree:add(f.data, payload)
        return
    end
    add_layout(tree, PACKET_HEADER, payload:range(0, PACKET_HEADER_BYTES))
    tree:add(f.data, payload:range(PACKET_HEADER_BYTES, payload:len() - PACKET_HEADER_BYTES))
end

-- Adds the payload of a frame with a body.
local function add_data(tree, kind, body, payload)
    if payload:len() == 0 then return end
    if kind == "PACKET" then return add_packet(tree, body, payload) end
    local type = body:range(36, 4):le_uint()
    local is_range = TYPES[type] == "DISCARD" or TYPES[type] == "WRITE_ZEROES"
    if kind == "REQUEST" and is_range and payload:len() == 16 then
        add_layout(tree, RANGE, payload)
    else
        tree:add(f.data, payload)
    end
    if kind == "BUSY" then tree:add_proto_expert_info(e.payload, "BUSY has no payload") end
end

local function control_line(kind, payload)
    if kind == "LIST" then return string.format("entry %d", payload:range(0, 2):le_uint()) end
    if kind == "ATTACH" then return text(payload:range(0, 64)) end
    if kind == "DEVICE" or kind == "ATTACHED" then
        local flags = payload:range(12, 4):le_uint()
        if flags % 2 == 0 then return "no such device" end
        return string.format("dev %d %s", payload:range(0, 2):le_uint(),
            text(payload:range(40, 64)))
    end
    if kind == "ENDING" then
        local code = payload:range(16, 2):le_uint()
        return CODES[code] or ("code " .. code)
    end
    return string.format("%d bytes", payload:len())
end

-- Adds a HELLO, CHALLENGE or WELCOME. Returns the size of all but its padding.
local function add_greeting(tree, kind, payload)
    add_layout(tree, GREETING, payload)
    local bytes = payload:range(34, 2):le_uint()
    local is_plain = payload:range(32, 1):uint() == 0
    local layout = MESSAGES[kind]
    if payload:len() < GREETING_BYTES + bytes or not layout and bytes > 0
        or layout and is_plain and bytes ~= MESSAGE_BYTES then
        tree:add_proto_expert_info(e.payload,
            string.format("%s has no message of %d bytes", kind, bytes))
        return payload:len()
    end
    if bytes > 0 then
        local message = payload:range(GREETING_BYTES, bytes)
        if is_plain then add_layout(tree, layout, message) else tree:add(f.message, message) end
    end
    return GREETING_BYTES + bytes
end

-- Adds the payload of a control message, and returns its line.
local function add_control(tree, kind, payload)
    local size, is_padded = SIZES[kind][1], SIZES[kind][2]
    if payload:len() < size or (payload:len() > size and not is_padded) then
        tree:add_proto_expert_info(e.payload, string.format(
            "%s has a payload of %d bytes%s, not %d",
            kind, size, is_padded and " or more" or "", payload:len()))
        if payload:len() > 0 then tree:add(f.data, payload) end
        return "wrong size"
    end
    if OUTSIDE[kind] then
        size = add_greeting(tree, kind, payload)
    else
        local is_nic = LAYOUTS[kind] == LAYOUTS.DEVICE
            and payload:range(12, 4):le_uint() % 0x80 >= 0x40
        add_layout(tree, is_nic and NIC or LAYOUTS[kind], payload)
    end
    if payload:len() > size then
        add_reserved(tree, payload:range(size, payload:len() - size))
    end
    return control_line(kind, payload)
end

local function give_up(tree, pinfo, complaint_kind, text)
    tree:add_proto_expert_info(complaint_kind, text)
    pinfo.cols.info = text
end

local function add_behind(tree, tvb, at, tag, is_ethernet)
    if tag > 0 then tree:add(f.tag, tvb:range(at, tag)) end
    at = at + tag
    local padding = tvb:len() - at
    if padding == 0 then return end
    tree:add(f.padding, tvb:range(at, padding))
    if not is_ethernet or tvb:len() > ETHERNET_PAYLOAD_MIN then
        tree:add_proto_expert_info(e.padding)
    end
end

local function check_counter(tree, kind, tvb)
    local is_zero_counter = is_zero(tvb:range(10, 8))
    local is_wrong = OUTSIDE[kind] and not is_zero_counter
        or not OUTSIDE[kind] and kind ~= "ENDING" and is_zero_counter
    if is_wrong then tree:add_proto_expert_info(e.counter) end
end

-- Adds the body of a REQUEST, ANSWER, BUSY or PACKET, and returns its line.
local function add_body(tree, pinfo, kind, session, body, payload_bytes)
    if kind == "PACKET" then
        add_layout(tree:add(vrio, body, "Packet"), PACKET_BODY, body)
        return packet_line(body, payload_bytes)
    end
    local item = tree:add(vrio, body, kind == "REQUEST" and "Request" or "Answer")
    add_layout(item, kind == "REQUEST" and REQUEST_BODY or ANSWER_BODY, body)
    return kind == "REQUEST" and request_line(pinfo, session, body, payload_bytes)
        or answer_line(pinfo, item, session, body, payload_bytes)
end

-- Adds the parts of a BUNDLE, and returns its line.
local function add_parts(tree, pinfo, session, payload)
    local at, count = 0, 0
    while at < payload:len() do
        local left = payload:len() - at
        local bytes = left >= PART_BYTES + BODY_BYTES and payload:range(at + 2, 2):le_uint()
        local kind = bytes and KINDS[payload:range(at, 1):uint()]
        local is_part = WITH_BODY[kind] and kind ~= "PACKET"
        if not bytes or left < PART_BYTES + BODY_BYTES + bytes or not is_part then
            tree:add_proto_expert_info(e.part, string.format("No part at %d of the payload", at))
            tree:add(f.data, payload:range(at, left))
            return string.format("%d parts, and %d bytes that are none", count, left)
        end
        local part = payload:range(at, PART_BYTES + BODY_BYTES + bytes)
        local item = tree:add(vrio, part, kind)
        add_layout(item, PART, part)
        local body = part:range(PART_BYTES, BODY_BYTES)
        item:append_text(", " .. add_body(item, pinfo, kind, session, body, bytes))
        if bytes > 0 then
            add_data(item, kind, body, part:range(PART_BYTES + BODY_BYTES, bytes))
        end
        at, count = at + part:len(), count + 1
    end
    return string.format("%d parts", count)
end

-- Adds the part of a frame behind its header, and returns its line.
local function add_rest(tree, pinfo, tvb, kind, tag, session)
    local at, payload_bytes = HEADER_BYTES, tvb:range(28, 2):le_uint()
    local line = ""
    local body
    if WITH_BODY[kind] then
        body = tvb:range(at, BODY_BYTES)
        at = at + BODY_BYTES
        line = add_body(tree, pinfo, kind, session, body, payload_bytes)
    end
    local payload = payload_bytes > 0 and tvb:range(at, payload_bytes)
    if tag > 0 then
        if payload then tree:add(f.sealed, payload) end
        if not body then line = string.format("sealed, %d bytes", payload_bytes) end
    elseif body then
        if payload then add_data(tree, kind, body, payload) end
    elseif payload and kind == "BUNDLE" then
        line = add_parts(tree, pinfo, session, payload)
    elseif payload then
        line = add_control(tree:add(vrio, payload, kind), kind, payload)
    else
        tree:add_proto_expert_info(e.payload, kind .. " has a payload")
    end
    return line
end

function vrio.dissector(tvb, pinfo, root)
    pinfo.cols.protocol = "vRIO"
    -- By the port or ethertype that led here.
    local is_ethernet = pinfo.match_uint == ETHERTYPE
    local tree = root:add(vrio, tvb())
    if tvb:len() < HEADER_BYTES then
        return give_up(tree, pinfo, e.truncated, "Truncated in the header")
    end
    if tvb:range(0, 1):uint() ~= VERSION then
        -- Only the place of the version is the same in all versions.
        add(tree, f.version, tvb:range(0, 1))
        return give_up(tree, pinfo, e.version, "Version " .. tvb:range(0, 1):uint())
    end
    add_header(tree, tvb)
    local kind = KINDS[tvb:range(1, 1):uint()]
    if not kind then
        return give_up(tree, pinfo, e.kind, "Kind " .. tvb:range(1, 1):uint())
    end
    check_counter(tree, kind, tvb)
    local frame_bytes = HEADER_BYTES + (WITH_BODY[kind] and BODY_BYTES or 0)
        + tvb:range(28, 2):le_uint()
    if tvb:len() < frame_bytes then
        return give_up(tree, pinfo, e.truncated, string.format(
            "%s, truncated: %d bytes of %d", kind, tvb:len(), frame_bytes))
    end
    local session = tostring(tvb:range(2, 8):bytes())
    local is_outside = OUTSIDE[kind] or is_zero(tvb:range(10, 8))
    local tag = tag_bytes(tvb:len() - frame_bytes, is_outside)
    if tvb:len() < frame_bytes + tag then
        return give_up(tree, pinfo, e.truncated, kind .. ", truncated in the tag")
    end
    local line = add_rest(tree, pinfo, tvb, kind, tag, session)
    add_behind(tree, tvb, frame_bytes, tag, is_ethernet)
    tree:append_text(", " .. kind)
    pinfo.cols.info = line == "" and kind or kind .. " " .. line
end

-- Several frames behind a fake TCP header.
local together = Proto("vrio_together", "Sidecore Frames Together")
local WINDOW = Field.new("tcp.window_size_value")
local SOURCE_PORT = Field.new("tcp.srcport")
local FRAMES_PORTS, MESSAGE_PORTS = 0x88, 0x89
local MESSAGE_BYTES = 16
local m = {
    kind = ProtoField.uint8("vrio.link.kind", "Kind", base.DEC, {
        [1] = "question", [2] = "answer" }),
    segment = ProtoField.uint8("vrio.link.segment", "Segment"),
    queue = ProtoField.uint8("vrio.link.queue", "Queue of the question's link"),
    nonce = ProtoField.uint64("vrio.link.nonce", "Nonce", base.HEX),
}
together.fields = m

-- Adds a segment of a message between links.
local function add_message(tree, segment)
    if segment:len() < MESSAGE_BYTES then return end
    tree:add(m.kind, segment:range(0, 1))
    tree:add(m.segment, segment:range(1, 1))
    tree:add(m.queue, segment:range(2, 1))
    tree:add_le(m.nonce, segment:range(8, 8))
end

function together.dissector(tvb, pinfo, root)
    local size, ports = WINDOW().value, math.floor(SOURCE_PORT().value / 256)
    if size == 0 or ports ~= FRAMES_PORTS and ports ~= MESSAGE_PORTS then return 0 end
    for at = 0, tvb:len() - 1, size do
        local segment = tvb:range(at, math.min(size, tvb:len() - at))
        if ports == FRAMES_PORTS then
            vrio.dissector(segment:tvb(), pinfo, root)
        else
            add_message(root:add(together, segment), segment)
            pinfo.cols.protocol = "vRIO"
            pinfo.cols.info = "message between links"
        end
    end
    return tvb:len()
end

DissectorTable.get("ethertype"):add(ETHERTYPE, vrio)
DissectorTable.get("tcp.port"):add(PORT, together)
DissectorTable.get("udp.port"):add(PORT, vrio)
