//! Links that pass most calls on to another link.

/// The methods of a `Link` that `self.link` carries out as they are: all but `receive` and `send`.
macro_rules! pass_through {
    () => {
        fn properties(&self) -> &sidecore_link::Properties {
            self.link.properties()
        }

        fn memory(&self) -> &sidecore_memory::GuestMemory {
            self.link.memory()
        }

        fn stats(&self) -> &std::sync::Arc<sidecore_link::LinkStats> {
            self.link.stats()
        }

        fn state(&self) -> sidecore_link::LinkState {
            self.link.state()
        }

        fn give_back(&mut self, frames: &mut Vec<Frame>) {
            self.link.give_back(frames);
        }

        fn buffers(&mut self, to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
            self.link.buffers(to, count, buffers);
        }

        fn cancel(&mut self, buffers: &mut Vec<Buffer>) {
            self.link.cancel(buffers);
        }

        fn arm(&mut self) -> sidecore_reactor::Arm {
            self.link.arm()
        }

        fn disarm(&mut self) {
            self.link.disarm();
        }

        fn wake_fd(&self) -> std::os::fd::BorrowedFd<'_> {
            self.link.wake_fd()
        }

        fn on_wake(&mut self) {
            self.link.on_wake();
        }

        fn deadline(&self) -> Option<Nanos> {
            self.link.deadline()
        }
    };
}
pub(super) use pass_through;
