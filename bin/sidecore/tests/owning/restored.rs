//! An etcd that is restored from a backup, while candidates live.

use std::path::PathBuf;

use rustix::process::Signal;

use sidecore_kit::wait;

use super::{Candidate, Cluster, Fence, PATIENCE, Site, TOKEN};

/// Owners that change after the backup.
const TAKEOVERS: usize = 3;

/// Two candidates, and a backup of etcd from before the newest owners.
struct Scene {
    site: Site,
    cluster: Cluster,
    candidates: [Candidate; 2],
    backup: PathBuf,
    /// The newest epoch.
    epoch: u64,
}

impl Scene {
    /// Each owner after the backup ends in this way.
    fn start(signal: Signal) -> Option<Self> {
        let site = Site::start()?;
        let cluster = Cluster::new(1);
        let mut owner = cluster.candidate(&site, "a", Fence::Lock);
        let mut epoch = cluster.progress_after(0);
        let mut other = cluster.candidate(&site, "b", Fence::Lock);
        other.until_it_says("waiting for key");
        let backup = cluster.path("backup");
        site.etcd().back_up(&site.namespace, &backup).unwrap();
        let mut names = ["a", "b"];
        for _ in 0..TAKEOVERS {
            owner.signal(signal);
            epoch = cluster.progress_after(epoch);
            if signal == Signal::KILL {
                owner = cluster.candidate(&site, names[0], Fence::Lock);
            }
            owner.until_it_says("waiting for key");
            std::mem::swap(&mut owner, &mut other);
            names.swap(0, 1);
        }
        Some(Self { site, cluster, candidates: [owner, other], backup, epoch })
    }

    /// Asserts that nothing was served after the restore.
    fn assert_not_served(&self) {
        assert_eq!(self.cluster.epoch(), self.epoch, "a new owner");
        assert!(!self.candidates.iter().any(Candidate::has_a_command), "an owner's command");
        self.cluster.check();
    }
}

/// After a restore of a backup as the same cluster, nothing is served until an operator has acted.
fn refuse_a_backup(signal: Signal) {
    let Some(mut scene) = Scene::start(signal) else { return };
    scene.site.restore_etcd(&scene.backup, TOKEN);
    let third = scene.cluster.candidate(&scene.site, "c", Fence::Lock);
    let served = format!("was served in epoch {}, and etcd is at", scene.epoch);
    for candidate in scene.candidates.iter().chain([&third]) {
        let listed = candidate.until_list_says(": refused");
        assert!(listed.contains(&served), "not \"{served}\":\n{listed}");
        assert!(listed.contains("as after a restore from a backup"), "{listed}");
        assert!(listed.contains("delete its record and its keys in etcd"), "{listed}");
    }
    scene.assert_not_served();

    // The remedy.
    let Scene { site, cluster, candidates, .. } = scene;
    drop((candidates, third));
    std::fs::remove_file(cluster.path("disk.owner")).unwrap();
    site.etcd().delete(&site.namespace, "/sidecore/1/").unwrap();
    let first = cluster.candidate(&site, "a", Fence::Lock);
    first.until_list_says("candidate a: serving in epoch");
}

#[test]
fn owners_that_handed_over_refuse_an_etcd_that_is_restored_from_a_backup() {
    refuse_a_backup(Signal::USR1);
}

#[test]
fn successors_of_killed_owners_refuse_an_etcd_that_is_restored_from_a_backup() {
    refuse_a_backup(Signal::KILL);
}

#[test]
fn candidates_refuse_another_cluster_with_the_contents_of_a_backup() {
    let Some(mut scene) = Scene::start(Signal::USR1) else { return };
    scene.site.restore_etcd(&scene.backup, "second");
    // A candidate takes no answer of another cluster. The owner's lease was with the first one.
    let [_, waiting] = &scene.candidates;
    waiting.until_list_says("this daemon's lease is with");
    wait::until("the command's end", PATIENCE, || {
        !scene.candidates.iter().any(Candidate::has_a_command)
    });
    scene.assert_not_served();
    // Restarted, as the list says.
    let Scene { site, cluster, candidates, .. } = scene;
    drop(candidates);
    let third = cluster.candidate(&site, "c", Fence::Lock);
    let listed = third.until_list_says("candidate c: refused");
    assert!(listed.contains("was served under etcd cluster"), "{listed}");
    cluster.check();
}
