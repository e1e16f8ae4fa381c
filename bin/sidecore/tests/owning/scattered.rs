//! Members of etcd that do not reach each other, while all candidates reach all of them.

use sidecore_cluster::boot_time;
use sidecore_kit::etcd::Scattered;
use sidecore_kit::namespace::Namespace;
use sidecore_kit::wait;

use super::{Candidate, Cluster, Fence, PATIENCE, Site};

/// The candidates' lease in nanoseconds.
const LEASE_NS: u64 = 3_000_000_000;

/// Two candidates of a scattered etcd.
struct Scene {
    /// End before etcd's networks.
    candidates: [Candidate; 2],
    cluster: Cluster,
    _etcd: Scattered,
    site: Site,
}

impl Scene {
    fn start() -> Option<Self> {
        let hub = Namespace::new().map_err(sidecore_skip::skip).ok()?;
        let etcd = Scattered::start(&hub).unwrap();
        let (site, cluster) = (Site { etcd: None, namespace: hub }, Cluster::new(1));
        let candidate =
            |name| cluster.candidate_at(&site, name, Fence::Lock, &[&Scattered::endpoints()]);
        let first = candidate("a");
        cluster.progress_after(0);
        let mut second = candidate("b");
        second.until_it_says("waiting for key");
        Some(Self { candidates: [first, second], cluster, _etcd: etcd, site })
    }

    fn hub(&self) -> &Namespace {
        &self.site.namespace
    }

    fn leader(&self) -> (u16, u64) {
        wait::succeed(PATIENCE, || Scattered::leader(self.hub()).ok_or("no leader"))
    }

    fn cut(&self, pairs: &[(u16, u16)]) {
        pairs.iter().for_each(|pair| Scattered::cut(self.hub(), *pair).unwrap());
    }

    fn heal(&self, pairs: &[(u16, u16)]) {
        pairs.iter().for_each(|pair| Scattered::heal(self.hub(), *pair).unwrap());
    }
}

#[test]
fn a_leader_without_its_followers_keeps_no_owner_beside_the_next_leaders() {
    let Some(scene) = Scene::start() else { return };
    for _ in 0..3 {
        let (leader, term) = scene.leader();
        let mut pairs = Scattered::pairs();
        pairs.retain(|(one, other)| [*one, *other].contains(&leader));
        scene.cut(&pairs);
        wait::until("the others elect a leader", PATIENCE, || scene.leader().1 > term);
        // By leases that the next leader has renewed, or granted: it counts all of them from zero.
        scene.cluster.progress_until(boot_time().0 + 2 * LEASE_NS);
        scene.heal(&pairs);
    }
    scene.cluster.check();
}

#[test]
fn members_that_are_all_alone_keep_no_owner() {
    let Some(mut scene) = Scene::start() else { return };
    let epoch = scene.cluster.epoch();
    scene.cut(&Scattered::pairs());
    let [owner, _] = &mut scene.candidates;
    owner.until_it_says("the lease has ended: the command was killed");
    assert!(!scene.candidates.iter().any(Candidate::has_a_command), "no leader renewed its lease");
    assert_eq!(scene.cluster.epoch(), epoch, "an owner without a leader");
    scene.heal(&Scattered::pairs());
    scene.cluster.progress_after(epoch);
    scene.cluster.check();
}
