//! Who may connect to a socket, as the file says it.

use sidecore_assembly::spec::SocketAccess;
use toml::Spanned;

use super::rules;
use super::section::Section;

/// As [`SocketAccess`], with places.
#[derive(Default)]
pub(super) struct AccessDraft {
    pub(super) owner: Option<Spanned<String>>,
    pub(super) group: Option<Spanned<String>>,
    mode: Option<u32>,
}

/// The keys for one socket.
pub(super) struct Keys {
    pub(super) owner: &'static str,
    pub(super) group: &'static str,
    pub(super) mode: &'static str,
}

/// Those of a device.
pub(super) const DEVICE: Keys = Keys { owner: "socket_owner", group: "socket_group", mode: "socket_mode" };

/// Those of the control socket.
pub(super) const CONTROL: Keys =
    Keys { owner: "control_socket_owner", group: "control_socket_group", mode: "control_socket_mode" };

/// Reads the keys of one socket.
pub(super) fn access(section: &mut Section<'_, '_, '_>, keys: &Keys) -> AccessDraft {
    let owner = section.string(keys.owner);
    let group = section.string(keys.group);
    let text = section.string(keys.mode);
    let mode = text.and_then(|text| match rules::mode(text.get_ref()) {
        Ok(mode) => Some(mode),
        Err(why) => {
            section.complain(text.span(), format!("`{}` {why}", keys.mode));
            None
        }
    });
    AccessDraft { owner, group, mode }
}

impl AccessDraft {
    pub(super) fn settle(self) -> SocketAccess {
        let (owner, group) = (self.owner.map(Spanned::into_inner), self.group.map(Spanned::into_inner));
        SocketAccess { owner, group, mode: self.mode }
    }

    /// The parts that this machine may not know, each with its place.
    pub(super) fn accounts(&self) -> impl Iterator<Item = (&Spanned<String>, SocketAccess)> {
        let of_user =
            |name: &Spanned<String>| SocketAccess { owner: Some(name.get_ref().clone()), ..SocketAccess::default() };
        let of_group =
            |name: &Spanned<String>| SocketAccess { group: Some(name.get_ref().clone()), ..SocketAccess::default() };
        let owner = self.owner.iter().map(move |name| (name, of_user(name)));
        owner.chain(self.group.iter().map(move |name| (name, of_group(name))))
    }
}
