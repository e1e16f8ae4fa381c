//! The identity of a controller.

/// The names and numbers of a controller in Identify (NVMe base 2.0, figure 275).
#[derive(Clone, Debug)]
pub struct Identity {
    /// Serial number, ASCII, 20 characters at most.
    pub serial: String,
    /// Model number, ASCII, 40 characters at most.
    pub model: String,
    /// The NVM subsystem's qualified name (SUBNQN, 4.5): `nqn.` and more, 223 bytes at most. A
    /// function that has a subsystem of its own has a name of its own, or Linux takes its
    /// controllers for paths to one and the same.
    pub subsystem_name: String,
    /// Controller identifier (CNTLID), unique in the subsystem.
    pub controller_id: u16,
}
