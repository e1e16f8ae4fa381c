//! A sidecore as other threads see it.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use sidecore_linux::EpollSleeper;
use sidecore_linux::core_time::ThreadTime;
use sidecore_reactor::{Closed, CoreContext, Pollable, Post, ReactorStats};
use sidecore_units::{CoreId, Nanos};

use crate::warning::CoreWarning;
use crate::{Handle, Reactor};

/// A sidecore as other threads see it. All clones are the same sidecore.
#[derive(Clone)]
pub struct Sidecore {
    pub(crate) name: String,
    pub(crate) cpu: Option<CoreId>,
    pub(crate) post: Post<EpollSleeper>,
    pub(crate) stats: Arc<ReactorStats>,
    pub(crate) started_at: Nanos,
    /// The kernel's accounts of the thread, if it keeps any.
    pub(crate) time: Option<Arc<ThreadTime>>,
    /// While the core is lost to other work, the percentage of the time that other work took.
    pub(crate) lost_percent: Arc<AtomicU32>,
    pub(crate) end: Arc<End>,
}

/// Why a unit does not run.
#[derive(Debug)]
pub enum NotStarted<E> {
    /// It could not be made.
    Unit(E),
    /// The sidecore cannot watch its descriptors.
    Watch(io::Error),
    /// The sidecore is gone.
    Gone,
}

/// How a sidecore's thread ends.
#[derive(Default)]
pub(crate) struct End {
    /// It was told to end.
    pub(crate) wanted: AtomicBool,
    /// It has ended without.
    pub(crate) unwanted: AtomicBool,
}

/// Notes the thread's end, also one by a panic.
pub(crate) struct EndWatch(pub(crate) Arc<End>);

impl Drop for EndWatch {
    fn drop(&mut self) {
        if !self.0.wanted.load(Ordering::Acquire) {
            self.0.unwanted.store(true, Ordering::Release);
        }
    }
}

impl Sidecore {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The core that it is pinned to.
    #[must_use]
    pub fn cpu(&self) -> Option<CoreId> {
        self.cpu
    }

    /// When it was started.
    #[must_use]
    pub fn started_at(&self) -> Nanos {
        self.started_at
    }

    /// The counters of its reactor.
    #[must_use]
    pub fn stats(&self) -> &ReactorStats {
        &self.stats
    }

    /// How long the thread ran and waited for its core; `None` if the kernel does not say.
    #[must_use]
    pub fn ran_and_waited(&self) -> Option<(Nanos, Nanos)> {
        self.time.as_ref()?.ran_and_waited().ok()
    }

    /// Other work took this share of the time, 0 to 1: the sidecore pauses from now on.
    pub fn set_core_lost(&self, share: f64) {
        let percent = (share * 100.0).round().clamp(1.0, 100.0) as u32;
        self.lost_percent.store(percent, Ordering::Relaxed);
        // Mail without captures is no allocation.
        self.tell(|reactor| reactor.set_without_core(true));
    }

    /// The core is free again: the sidecore polls as configured.
    pub fn set_core_regained(&self) {
        self.tell(|reactor| reactor.set_without_core(false));
        self.lost_percent.store(0, Ordering::Release);
    }

    /// The warning to show while the core is lost.
    #[must_use]
    pub fn core_warning(&self) -> Option<CoreWarning<'_>> {
        let percent = self.lost_percent.load(Ordering::Acquire);
        (percent > 0).then_some(CoreWarning { sidecore: &self.name, cpu: self.cpu, percent })
    }

    /// Runs `question` on the sidecore's thread, and waits for the answer.
    ///
    /// # Errors
    /// The sidecore is gone; `question` was dropped.
    pub fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Reactor) -> T + Send + 'static,
    ) -> Result<T, Closed> {
        let (reply, answer) = oneshot::channel();
        self.post.send(Box::new(move |reactor| {
            // The asking thread may have ended.
            let _ = reply.send(question(reactor));
        }))?;
        answer.recv().map_err(|_| Closed)
    }

    /// Runs `task` on the sidecore's thread, and does not wait. If the sidecore is gone, `task` is
    /// dropped.
    pub fn tell(&self, task: impl FnOnce(&mut Reactor) + Send + 'static) {
        let _ = self.post.send(Box::new(task));
    }

    /// Makes a unit on the sidecore's thread, with the state that all units there share, and polls
    /// it from then on. Waits until it is made: a turn at most.
    ///
    /// # Errors
    /// See [`NotStarted`].
    pub fn start<U: Pollable, E: Send + 'static>(
        &self,
        make: impl FnOnce(&Rc<CoreContext>) -> Result<U, E> + Send + 'static,
    ) -> Result<Handle<U>, NotStarted<E>> {
        let started = self.ask(move |reactor| {
            let unit = make(reactor.context()).map_err(NotStarted::Unit)?;
            reactor.add(unit).map_err(NotStarted::Watch)
        });
        let id = started.map_err(|_| NotStarted::Gone)??;
        Ok(Handle { sidecore: self.clone(), id })
    }

    /// Makes a unit as [`start`](Self::start) does, and does not wait: calls `started` on the
    /// sidecore's thread. If the sidecore is gone, `started` is dropped.
    pub fn start_then<U: Pollable, E: 'static>(
        &self,
        make: impl FnOnce(&Rc<CoreContext>) -> Result<U, E> + Send + 'static,
        started: impl FnOnce(Result<Handle<U>, NotStarted<E>>) + Send + 'static,
    ) {
        let sidecore = self.clone();
        self.tell(move |reactor| {
            let made = make(reactor.context()).map_err(NotStarted::Unit);
            let added = made.and_then(|unit| reactor.add(unit).map_err(NotStarted::Watch));
            started(added.map(|id| Handle { sidecore, id }));
        });
    }

    /// Whether both are the same sidecore.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.end, &other.end)
    }

    /// Whether it has ended by itself: nothing on it will be served again.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.end.unwanted.load(Ordering::Acquire)
    }
}
