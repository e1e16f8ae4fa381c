//! The client's requests for mirrors.

use hyper::Method;
use sidecore_assembly::report::MirrorReport;

use super::{Client, ClientError, DISK_PATIENCE, LONG_PATIENCE, PATIENCE, escaped};
use crate::api::{MIRRORS_PATH, Mirrors, NewLeg, Permission, RepairOfLeg};

fn path(mirror: &str) -> String {
    format!("{MIRRORS_PATH}/{}", escaped(mirror))
}

impl Client {
    /// Returns the mirrors in use.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn mirrors(&self) -> Result<Vec<MirrorReport>, ClientError> {
        self.json::<Mirrors>(MIRRORS_PATH).map(|answer| answer.mirrors)
    }

    /// Makes a store a new leg of a mirror.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn add_leg(&self, mirror: &str, store: &str) -> Result<(), ClientError> {
        let leg = NewLeg { store: store.to_owned() };
        self.post_only(&format!("{}/legs", path(mirror)), &leg, DISK_PATIENCE).map(drop)
    }

    /// Lets a leg of a mirror go for good, by its store or its number.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove_leg(&self, mirror: &str, leg: &str) -> Result<(), ClientError> {
        let path = format!("{}/legs/{}", path(mirror), escaped(leg));
        self.ask(Method::DELETE, &path, None, DISK_PATIENCE).map(drop)
    }

    /// Uses a store that is a leg of a mirror, and was missing or has failed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn attach_leg(&self, mirror: &str, store: &str) -> Result<(), ClientError> {
        let path = format!("{}/legs/{}/attach", path(mirror), escaped(store));
        self.ask(Method::POST, &path, None, DISK_PATIENCE).map(drop)
    }

    /// Writes bytes of one leg to another.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn repair_leg(&self, mirror: &str, repair: &RepairOfLeg) -> Result<(), ClientError> {
        self.post_only(&format!("{}/repair", path(mirror)), repair, LONG_PATIENCE).map(drop)
    }

    /// Lets half of a mirror's legs go on without the others, once: `without` has their numbers.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn permit_mirror(&self, mirror: &str, without: &[usize]) -> Result<(), ClientError> {
        let permission = Permission { without: without.to_vec() };
        self.post_only(&format!("{}/permit", path(mirror)), &permission, PATIENCE).map(drop)
    }
}
