//! The seam to the manager of a subsystem: its namespaces, and its secondary controllers (NVMe base
//! 2.0, 8.11, 8.26).
//!
//! Only a primary controller has one. What a manager is asked for may take its time: it answers by
//! a [`Reply`].

use std::fmt;

use crate::Status;

/// A namespace that exists in the subsystem, whether or not it is attached to a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedNamespace {
    /// Namespace identifier (NSID) in the subsystem.
    pub id: u32,
    /// Size in bytes.
    pub capacity_bytes: u64,
    /// The size of a logical block in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// See [`Namespace::nguid`](crate::Namespace::nguid).
    pub nguid: [u8; 16],
    /// Whether it is write protected.
    pub read_only: bool,
    /// The controllers that it is attached to, by their identifiers.
    pub controllers: Vec<u16>,
}

/// A controller that a primary controller manages: a virtual function's (figure 282).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecondaryController {
    /// Controller identifier (CNTLID).
    pub id: u16,
    /// Whether it is online.
    pub online: bool,
    /// Its virtual function's number, from 1.
    pub virtual_function: u16,
    /// The number of queue resources assigned; 0 if queues are not flexible.
    pub queues: u16,
    /// The number of interrupt resources assigned; 0 if interrupts are not flexible.
    pub interrupts: u16,
}

/// A kind of resource that secondary controllers are assigned (figure 249).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// VQ: a submission and a completion queue.
    Queue,
    /// VI: an interrupt vector.
    Interrupt,
}

/// How much there is of a resource that can be assigned to secondary controllers (figure 281).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlexibleResources {
    /// All of them (VQFRT, VIFRT).
    pub total: u32,
    /// How many secondary controllers have been assigned (VQRFA, VIRFA).
    pub assigned: u32,
    /// How many the primary controller has been allocated (VQRFAP, VIRFAP).
    pub primary_allocated: u16,
    /// How many the primary controller has for itself alone (VQPRT, VIPRT).
    pub primary_private: u16,
    /// Most that one secondary controller can be assigned (VQFRSM, VIFRSM).
    pub secondary_max: u16,
    /// In which units they are preferably assigned (VQGRAN, VIGRAN).
    pub granularity: u16,
}

/// A namespace to be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateNamespace {
    /// Size in bytes; never zero.
    pub capacity_bytes: u64,
    /// The size of a logical block in bytes: 512 or 4096.
    pub block_bytes: u32,
}

/// The reason why a manager refuses a request. Each has a status of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManageError {
    /// No namespace has this number.
    #[error("there is no such namespace")]
    NoSuchNamespace,
    /// The store has no room for it.
    #[error("the store has no room for it")]
    NoSpace,
    /// There are as many namespaces as there can be.
    #[error("no number is left for another namespace")]
    NoIdLeft,
    /// Blocks of this size cannot be had.
    #[error("the store has no blocks of that size")]
    InvalidFormat,
    /// It is attached to that controller.
    #[error("the namespace is attached to that controller already")]
    AlreadyAttached,
    /// It is attached to another controller, and one is all it can be attached to.
    #[error("the namespace is attached to another controller")]
    Private,
    /// It is not attached to that controller.
    #[error("the namespace is not attached to that controller")]
    NotAttached,
    /// The controller has as many namespaces as it can have.
    #[error("the controller can have no more namespaces")]
    AttachmentLimit,
    /// No secondary controller has this identifier, or none that can be meant.
    #[error("there is no such controller")]
    NoSuchController,
    /// The controller has to be offline for that, or online, or cannot become so.
    #[error("the controller is in the wrong state")]
    InvalidState,
    /// So many resources cannot be had.
    #[error("the number of resources is invalid")]
    InvalidCount,
    /// That kind of resource cannot be assigned.
    #[error("the kind of resource is invalid")]
    InvalidResource,
    /// It is not allowed: this namespace, for instance, is not to be touched.
    #[error("it is not allowed")]
    Denied,
    /// It went wrong.
    #[error("it went wrong")]
    Internal,
}

impl From<ManageError> for Status {
    fn from(error: ManageError) -> Self {
        match error {
            ManageError::NoSuchNamespace => Self::INVALID_NAMESPACE,
            ManageError::NoSpace => Self::NAMESPACE_INSUFFICIENT_CAPACITY,
            ManageError::NoIdLeft => Self::NAMESPACE_ID_UNAVAILABLE,
            ManageError::InvalidFormat => Self::INVALID_FORMAT,
            ManageError::AlreadyAttached => Self::NAMESPACE_ALREADY_ATTACHED,
            ManageError::Private => Self::NAMESPACE_IS_PRIVATE,
            ManageError::NotAttached => Self::NAMESPACE_NOT_ATTACHED,
            ManageError::AttachmentLimit => Self::NAMESPACE_ATTACHMENT_LIMIT,
            ManageError::NoSuchController => Self::INVALID_CONTROLLER_ID,
            ManageError::InvalidState => Self::INVALID_SECONDARY_STATE,
            ManageError::InvalidCount => Self::INVALID_RESOURCE_COUNT,
            ManageError::InvalidResource => Self::INVALID_RESOURCE_ID,
            ManageError::Denied => Self::OPERATION_DENIED,
            ManageError::Internal => Self::INTERNAL_ERROR,
        }
    }
}

/// The reply to a manager's request, given once, from any thread. Dropping it replies
/// [`ManageError::Internal`].
#[must_use]
pub struct Reply(Option<Then>);

type Then = Box<dyn FnOnce(Result<u32, ManageError>) + Send>;

impl Reply {
    /// Calls `then` with the result.
    pub fn new(then: impl FnOnce(Result<u32, ManageError>) + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    /// Replies with success; `value` is the command's result, if it has one.
    pub fn ok(self, value: u32) {
        self.answer(Ok(value));
    }

    /// Replies with an error.
    pub fn fail(self, error: ManageError) {
        self.answer(Err(error));
    }

    /// Replies with a result.
    pub fn answer(mut self, result: Result<u32, ManageError>) {
        if let Some(then) = self.0.take() {
            then(result);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(Err(ManageError::Internal));
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Reply").field(&self.0.is_some()).finish()
    }
}

/// The manager of a subsystem. Called with the primary controller's lock held, so that it must
/// neither wait nor call that controller back; it may reply before it returns, or later from
/// another thread.
///
/// The controller has checked what it can by itself: that identifiers are in range, sizes not zero,
/// lists sorted.
pub trait Manager: Send + Sync {
    /// All namespaces but the primary controller's own, in the order of their numbers, which begin
    /// with 2.
    fn allocated(&self) -> Vec<AllocatedNamespace>;

    /// The biggest number that a namespace can have (NN).
    fn max_namespaces(&self) -> u32;

    /// The store's size and what of it is not allocated, in bytes (TNVMCAP, UNVMCAP).
    fn capacity(&self) -> (u128, u128);

    /// All secondary controllers, in the order of their identifiers.
    fn secondary_controllers(&self) -> Vec<SecondaryController>;

    /// How much of a resource can be assigned to secondary controllers; `None` if what they have is
    /// fixed.
    fn flexible(&self, resource: Resource) -> Option<FlexibleResources>;

    /// Creates a namespace; the reply is its number.
    fn create(&self, namespace: CreateNamespace, reply: Reply);

    /// Deletes a namespace with all that is in it, and detaches it everywhere; all of them for
    /// `None`.
    fn delete(&self, namespace: Option<u32>, reply: Reply);

    /// Attaches a namespace to each of `controllers`, or to none of them.
    fn attach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply);

    /// Detaches a namespace from each of `controllers`, or from none of them.
    fn detach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply);

    /// Takes a secondary controller online or offline; it is reset on the way (8.26.3).
    fn set_online(&self, controller: u16, online: bool, reply: Reply);

    /// Assigns so many of a resource to a secondary controller that is offline; the reply is how
    /// many it has been assigned.
    fn assign(&self, controller: u16, resource: Resource, count: u16, reply: Reply);

    /// Allocates so many of a resource to the primary controller from its next reset on; the reply
    /// is how many it has been allocated.
    fn allocate(&self, resource: Resource, count: u16, reply: Reply);
}
