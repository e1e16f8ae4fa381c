//! The counters of a port, and the reasons to drop a frame.

use sidecore_telemetry::counters;

/// Defines the reasons with their counters.
macro_rules! reasons {
    (
        in { $($(#[doc = $in_doc:literal])+ $In:ident $in_field:ident = $in_metric:literal,)+ }
        out { $($(#[doc = $out_doc:literal])+ $Out:ident $out_field:ident = $out_metric:literal,)+ }
    ) => {
        /// Why a frame was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DropReason {
            $($(#[doc = $in_doc])+ $In,)+
            $($(#[doc = $out_doc])+ $Out,)+
        }

        impl DropReason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$In,)+ $(Self::$Out,)+];

            /// Whether the port that sends the frame counts it, or the port that would receive it.
            #[must_use]
            pub const fn is_ingress(self) -> bool {
                match self {
                    $(Self::$In => true,)+
                    $(Self::$Out => false,)+
                }
            }

            /// The name of the reason, as in its counter.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$In => stringify!($in_field),)+
                    $(Self::$Out => stringify!($out_field),)+
                }
            }
        }

        counters! {
            /// The counters of a port, with the names of RFC 2863: *in* is from the station, *out*
            /// is to it. Its sidecore alone writes them, any thread may read them.
            pub struct PortStats;

            /// The counters of a port at one moment, or the sum over several ports.
            pub struct PortCounts;

            /// Frames from the station, those that were dropped included.
            pub in_frames: Counter = "in_frames_total",
            /// Bytes in these frames, without virtio headers and check sequences.
            pub in_octets: Counter = "in_octets_total",
            /// Frames from the station that the host's kernel had no room for. They are not among
            /// the others.
            pub in_losses: Counter = "in_losses_total",
            /// Frames from the station for a group of stations.
            pub in_group: Counter = "in_group_frames_total",
            /// Copies of frames from the station that were made for other ports: one of most
            /// frames, several of a frame for a group or for an unknown station.
            pub in_copies: Counter = "in_copies_total",
            /// Frames from the station that went to all ports.
            pub in_floods: Counter = "in_floods_total",
            /// Frames to the station.
            pub out_frames: Counter = "out_frames_total",
            /// Bytes in these frames, without virtio headers and check sequences.
            pub out_octets: Counter = "out_octets_total",
            /// Frames to the station for a group of stations.
            pub out_group: Counter = "out_group_frames_total",
            /// Copies delivered to the station: a large one may be several frames.
            pub out_copies: Counter = "out_copies_total",
            /// Frames to the station whose checksum was computed here.
            pub out_checksums: Counter = "out_checksums_total",
            /// Large frames to the station that were cut here.
            pub out_cuts: Counter = "out_cuts_total",
            /// Parts of large frames that the station had no buffers for.
            pub out_cut_losses: Counter = "out_cut_losses_total",
            /// Frames to the station that did not reach it, though they are among those above: the
            /// host's kernel has refused them.
            pub out_errors: Counter = "out_errors_total",
            /// Frames to the station that waited for buffers.
            pub out_waits: Counter = "out_waits_total",
            /// Stations learnt on the port.
            pub learned: Counter = "learned_total",
            /// Stations not learnt because the port, or the table, had as many as it may have.
            pub not_learned: Counter = "not_learned_total",
            /// Stations that moved to the port from another one.
            pub moves: Counter = "moves_total",
            /// Times that the port was blocked because of a loop.
            pub blocks: Counter = "blocks_total",
            $($(#[doc = $in_doc])+ pub $in_field: Counter = $in_metric,)+
            $($(#[doc = $out_doc])+ pub $out_field: Counter = $out_metric,)+
        }

        impl PortStats {
            /// Counts a drop.
            pub(crate) fn dropped(&self, reason: DropReason) {
                match reason {
                    $(DropReason::$In => &self.$in_field,)+
                    $(DropReason::$Out => &self.$out_field,)+
                }
                .add(1);
            }
        }

        impl PortCounts {
            /// The drops for this reason.
            #[must_use]
            pub const fn drops(&self, reason: DropReason) -> u64 {
                match reason {
                    $(DropReason::$In => self.$in_field,)+
                    $(DropReason::$Out => self.$out_field,)+
                }
            }
        }
    };
}

reasons! {
    in {
        /// Frames from the station dropped: shorter than an Ethernet header, or empty.
        Runt dropped_runt = "dropped_runt_total",
        /// Frames from the station dropped: longer than the station's MTU, with no offload to cut
        /// them.
        TooLong dropped_too_long = "dropped_too_long_total",
        /// Frames from the station dropped: in more pieces of memory than a frame may have, or
        /// outside of the station's memory.
        Fragmented dropped_fragmented = "dropped_fragmented_total",
        /// Frames from the station dropped: with a virtio header that makes no sense, or asks for
        /// an offload that was not negotiated.
        BadOffload dropped_bad_offload = "dropped_bad_offload_total",
        /// Frames from the station dropped: from a source address that no station can have: zero,
        /// or a group.
        BadSource dropped_bad_source = "dropped_bad_source_total",
        /// Frames from the station dropped: with more than one VLAN tag, or a service tag.
        VlanStack dropped_vlan_stack = "dropped_vlan_stack_total",
        /// Frames from the station dropped: tagged for a VLAN that the port is not in, or untagged
        /// where the port has no native VLAN.
        VlanIngress dropped_vlan_ingress = "dropped_vlan_ingress_total",
        /// Frames from the station dropped: with a source address that is not the station's, or is
        /// another station's.
        SpoofedMac dropped_spoofed_mac = "dropped_spoofed_mac_total",
        /// Frames from the station dropped: of ARP that claim an address of another station.
        SpoofedArp dropped_spoofed_arp = "dropped_spoofed_arp_total",
        /// Frames from the station dropped: with an IPv4 source that is not the station's.
        SpoofedIpv4 dropped_spoofed_ipv4 = "dropped_spoofed_ipv4_total",
        /// Frames from the station dropped: with an IPv6 source that is not the station's, or
        /// headers that hide it.
        SpoofedIpv6 dropped_spoofed_ipv6 = "dropped_spoofed_ipv6_total",
        /// Frames from the station dropped: of neighbour discovery that claim an address of another
        /// station, or to be a router.
        SpoofedNd dropped_spoofed_nd = "dropped_spoofed_nd_total",
        /// Frames from the station dropped: for all ports, above the port's flood limit.
        FloodLimit dropped_flood_limit = "dropped_flood_limit_total",
        /// Frames from the station dropped: on a port that is blocked because of a loop.
        Blocked dropped_blocked = "dropped_blocked_total",
        /// Frames from the station dropped: on a port that stands by for another one of its team.
        Standby dropped_standby = "dropped_standby_total",
        /// Frames from the station dropped: answers to the switch's own probes.
        Probe dropped_probe = "dropped_probe_total",
        /// Frames from the station dropped: that no port may be given.
        NoDestination dropped_no_destination = "dropped_no_destination_total",
        /// Frames from the station dropped: for a station on the port that they came from.
        SamePort dropped_same_port = "dropped_same_port_total",
        /// Frames from the station dropped: for an isolated port, from another one.
        Isolated dropped_isolated = "dropped_isolated_total",
        /// Frames from the station dropped: from an uplink for another one.
        Uplinks dropped_uplinks = "dropped_uplinks_total",
        /// Frames from the station dropped: for a port that is not in their VLAN.
        VlanEgress dropped_vlan_egress = "dropped_vlan_egress_total",
        /// Frames from the station dropped: for the reserved addresses of bridges (IEEE 802.1Q,
        /// 8.6.3).
        Reserved dropped_reserved = "dropped_reserved_total",
        /// Frames from the station dropped: by a rule of the port's firewall.
        Rule dropped_rule = "dropped_rule_total",
        /// Frames from the station dropped: on a port with a firewall, with IP or transport headers
        /// that are wrong, or not whole within the first 256 bytes.
        Headers dropped_headers = "dropped_headers_total",
        /// Frames from the station dropped: on a port with a firewall, fragments whose first one
        /// has not passed before, or that could overwrite its headers.
        Fragment dropped_fragment = "dropped_fragment_total",
        /// Frames from the station dropped: above a rate limit of the port.
        Limit dropped_limit = "dropped_limit_total",
        /// Frames from the station dropped: a stage of the port has failed.
        Failed dropped_failed = "dropped_failed_total",
        /// Frames from the station dropped: lost on the port's wire, which was made a bad one.
        Lost dropped_lost = "dropped_lost_total",
        /// Frames from the station dropped: on a queue that the driver or its VMM has disabled.
        Disabled dropped_disabled = "dropped_disabled_total",
        /// Frames from the station dropped: that waited when a queue was detached.
        Detached dropped_detached = "dropped_detached_total",
    }
    out {
        /// Frames to the station dropped: to a port whose link is down or that has no queue.
        PortDown dropped_port_down = "dropped_port_down_total",
        /// Frames to the station dropped: to a station without buffers, after eight turns.
        NoBuffers dropped_no_buffers = "dropped_no_buffers_total",
        /// Frames to the station dropped: to a station whose next buffer is too small for them.
        SmallBuffers dropped_small_buffers = "dropped_small_buffers_total",
        /// Frames to the station dropped: to a station whose MTU is smaller.
        Mtu dropped_mtu = "dropped_mtu_total",
        /// Frames to the station dropped: by a rule of the port's firewall.
        RuleOut dropped_rule_out = "dropped_rule_out_total",
        /// Frames to the station dropped: on a port with a firewall, with IP or transport headers
        /// that are wrong, or not whole within the first 256 bytes.
        HeadersOut dropped_headers_out = "dropped_headers_out_total",
        /// Frames to the station dropped: on a port with a firewall, fragments whose first one has
        /// not passed before, or that could overwrite its headers.
        FragmentOut dropped_fragment_out = "dropped_fragment_out_total",
        /// Frames to the station dropped: above a rate limit of the port.
        LimitOut dropped_limit_out = "dropped_limit_out_total",
        /// Frames to the station dropped: a stage of the port has failed.
        FailedOut dropped_failed_out = "dropped_failed_out_total",
        /// Frames to the station dropped: lost on the port's wire, which was made a bad one.
        LostOut dropped_lost_out = "dropped_lost_out_total",
        /// Frames to the station dropped: to a queue that the driver or its VMM has disabled.
        NotEnabled dropped_not_enabled = "dropped_not_enabled_total",
        /// Frames to the station dropped: to a queue that is broken.
        Unusable dropped_unusable = "dropped_unusable_total",
    }
}

impl PortCounts {
    /// Frames from the station that were dropped, for whatever reason.
    #[must_use]
    pub fn in_discards(&self) -> u64 {
        self.discards(true)
    }

    /// Frames to the station that were dropped, for whatever reason.
    #[must_use]
    pub fn out_discards(&self) -> u64 {
        self.discards(false)
    }

    fn discards(&self, ingress: bool) -> u64 {
        let reasons = DropReason::ALL.iter().filter(|reason| reason.is_ingress() == ingress);
        reasons.fold(0, |sum, reason| sum.saturating_add(self.drops(*reason)))
    }
}
