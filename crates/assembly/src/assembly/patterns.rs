//! Devices of IOhosts that are served by patterns, as soon as their IOhosts have them.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::Assembly;
use crate::AssemblyError;
use crate::report::{DeviceState, RefusedDeviceReport, ServeReport};
use crate::spec::{
    DEVICE_IN_PATH, DeviceSpec, RemoteSpec, ServeSpec, StageSpec, StoreKind, StoreSpec, is_name,
    is_socket_path,
};

/// The time between two looks at the lists of IOhosts, which are as of the newest report.
const PERIOD: Duration = Duration::from_millis(500);

/// A device that the IOhost has no longer is removed after this time: an IOhost that was started
/// again makes its devices one by one.
const GRACE: Duration = Duration::from_secs(5);

/// The time between two attempts to serve a device.
const RETRY: Duration = Duration::from_secs(5);

/// The most devices that one look adds, so that an IOhost that makes thousands delays no other.
const ADDITIONS: usize = 16;

/// A device of an IOhost: the IOhost's name, and its own.
type Key = (String, String);

/// The devices that patterns have made, and those that could not be made.
#[derive(Default)]
pub(super) struct Patterns {
    made: BTreeMap<Key, Made>,
    refused: BTreeMap<Key, Refusal>,
}

/// A device that a pattern has made.
struct Made {
    /// The pattern's name.
    serve: String,
    /// When the IOhost was first seen without it.
    gone: Option<Instant>,
    /// VMMs are connected to it.
    is_used: bool,
    /// An operator has removed it. It is made again when the IOhost has made it again.
    is_dismissed: bool,
}

struct Refusal {
    serve: String,
    reason: String,
    at: Instant,
    /// It was tried. Others are refused by rule.
    is_tried: bool,
}

/// The state of the daemon's own devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// There is no such device.
    None,
    Unused,
    /// A VMM is connected.
    Used,
}

/// Changes to be made.
#[derive(Default)]
struct Changes {
    /// Each with the pattern that fits.
    add: Vec<(Key, ServeSpec)>,
    remove: Vec<Key>,
}

impl Patterns {
    /// Compares the lists of IOhosts, by their names, with the devices that were made. An IOhost
    /// without a list is away, and keeps its devices.
    fn look(
        &mut self,
        now: Instant,
        serves: &[ServeSpec],
        lists: &BTreeMap<String, Vec<String>>,
        used: impl Fn(&str) -> Use,
    ) -> Changes {
        let mut changes = Changes::default();
        let fits = |(iohost, device): &Key| {
            serves.iter().find(|serve| serve.iohost == *iohost && serve.fits(device))
        };
        let has = |(iohost, device): &Key| Some(lists.get(iohost)?.contains(device));
        self.made.retain(|key, made| {
            let state = used(&key.1);
            (made.is_used, made.is_dismissed) = (state == Use::Used, state == Use::None);
            let is_served = fits(key).is_some_and(|serve| serve.name == made.serve);
            match has(key) {
                // Only time in which the IOhost is there counts.
                None if is_served => made.gone = None,
                Some(true) if is_served => made.gone = None,
                _ => drop(made.gone.get_or_insert(now)),
            }
            let is_over = made.gone.is_some_and(|gone| now.duration_since(gone) >= GRACE);
            match (is_over, state) {
                (true, Use::None) => return false,
                (true, Use::Unused) => changes.remove.push(key.clone()),
                _ => {}
            }
            true
        });
        self.refused.retain(|key, refusal| {
            let is_served = fits(key).is_some_and(|serve| serve.name == refusal.serve);
            is_served && has(key) != Some(false)
        });
        for (iohost, devices) in lists {
            for device in devices {
                let key = (iohost.clone(), device.clone());
                let Some(serve) = fits(&key).filter(|_| !self.made.contains_key(&key)) else {
                    continue;
                };
                if let Some(reason) = self.obstacle(serve, device, &changes) {
                    self.refuse(now, key, &serve.name, reason, false);
                } else if changes.add.len() < ADDITIONS && self.may_try(now, &key) {
                    changes.add.push((key, serve.clone()));
                }
            }
        }
        changes
    }

    /// The rule by which a device is not served.
    fn obstacle(&self, serve: &ServeSpec, device: &str, changes: &Changes) -> Option<String> {
        // The name becomes a part of a path.
        if !is_name(device) || device.starts_with(['.', '-']) {
            return Some(
                "its name is none for a local device: letters, digits, `-`, `_` and `.`, and \
                 neither `.` nor `-` at the start"
                    .to_owned(),
            );
        }
        let made = self.made.values().filter(|made| made.serve == serve.name).count();
        let added = changes.add.iter().filter(|(_, by)| by.name == serve.name).count();
        (made.saturating_add(added) >= serve.devices_max).then(|| {
            format!("the pattern has {} devices already: raise `devices_max`", serve.devices_max)
        })
    }

    fn may_try(&self, now: Instant, key: &Key) -> bool {
        self.refused
            .get(key)
            .is_none_or(|refusal| !refusal.is_tried || now.duration_since(refusal.at) >= RETRY)
    }

    fn refuse(&mut self, at: Instant, key: Key, serve: &str, reason: String, is_tried: bool) {
        let before = self.refused.get(&key);
        if before.is_none_or(|before| before.reason != reason) {
            tracing::warn!(serve, iohost = key.0, device = ?key.1, "not served: {reason}");
        }
        self.refused.insert(key, Refusal { serve: serve.to_owned(), reason, at, is_tried });
    }

    fn added(&mut self, now: Instant, key: Key, serve: &str, added: Result<(), AssemblyError>) {
        match added {
            Ok(()) => {
                tracing::info!(serve, iohost = key.0, device = key.1, "served by its pattern");
                self.refused.remove(&key);
                let (serve, gone) = (serve.to_owned(), None);
                let made = Made { serve, gone, is_used: false, is_dismissed: false };
                self.made.insert(key, made);
            }
            Err(error) => self.refuse(now, key, serve, error.to_string(), true),
        }
    }

    /// Reports each pattern.
    pub(super) fn report(&self, serves: &[ServeSpec]) -> Vec<ServeReport> {
        let report = |serve: &ServeSpec| {
            let made = || {
                let its = self.made.iter().filter(|(_, made)| made.serve == serve.name);
                its.filter(|(_, made)| !made.is_dismissed)
            };
            let name = |((_, device), _): (&Key, &Made)| device.clone();
            let refused = self.refused.iter().filter(|(_, refusal)| refusal.serve == serve.name);
            ServeReport {
                name: serve.name.clone(),
                iohost: serve.iohost.clone(),
                pattern: serve.pattern.clone(),
                devices: made().map(name).collect(),
                leaving: made()
                    .filter(|(_, made)| made.gone.is_some() && made.is_used)
                    .map(name)
                    .collect(),
                refused: refused
                    .map(|((_, device), refusal)| RefusedDeviceReport {
                        device: device.clone(),
                        reason: refusal.reason.clone(),
                    })
                    .collect(),
            }
        };
        serves.iter().map(report).collect()
    }
}

/// The pattern that has made a device of this name for an earlier process. `None` if devices of
/// several IOhosts may have the name: a guest must not get the other one's.
fn maker<'a>(serves: &'a [ServeSpec], device: &str) -> Option<&'a ServeSpec> {
    let mut fitting = serves.iter().filter(|serve| serve.fits(device));
    let first = fitting.next()?;
    fitting.all(|other| other.iohost == first.iohost).then_some(first)
}

/// The local device for a device of an IOhost, and its store.
fn local(serve: &ServeSpec, device: &str) -> Result<(DeviceSpec, StoreSpec), AssemblyError> {
    let socket = serve.device.socket.display().to_string().replace(DEVICE_IN_PATH, device);
    let failed = |error| AssemblyError::Remote { name: device.to_owned(), error };
    is_socket_path("socket", &sidecore_keys::Value::Path(socket.clone().into())).map_err(failed)?;
    let stages = serve.stages.iter().map(|stage| StageSpec::of_device(stage, device));
    let stages = stages.collect::<Result<_, _>>().map_err(failed)?;
    // Names in the configuration have no slash.
    let store = format!("{}/{device}@{device}", serve.iohost);
    let remote =
        RemoteSpec { device: Some(device.to_owned()), ..RemoteSpec::new(serve.iohost.as_str()) };
    let spec = DeviceSpec {
        name: device.to_owned(),
        store: store.clone(),
        socket: socket.into(),
        ..serve.device.clone()
    };
    Ok((spec, StoreSpec { stages, ..StoreSpec::new(store, StoreKind::Remote(remote)) }))
}

impl Assembly {
    /// Starts the thread that serves devices of IOhosts by patterns, until the assembly ends.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn serve_patterns(self: &Arc<Self>) -> Result<(), AssemblyError> {
        let weak = Arc::downgrade(self);
        let serve = move || {
            loop {
                std::thread::park_timeout(PERIOD);
                let Some(assembly) = weak.upgrade() else { return };
                if assembly.graph().ends {
                    return;
                }
                assembly.look_at_patterns();
            }
        };
        std::thread::Builder::new()
            .name("patterns".to_owned())
            .spawn(serve)
            .map_err(AssemblyError::Threads)?;
        Ok(())
    }

    /// Makes devices again that patterns had made for an earlier process, and that guests know:
    /// those that it has promised, and those whose clients it has exported. Like configured ones,
    /// they exist before their IOhosts are there.
    pub(super) fn make_again(&self, exported: &[String]) {
        let spec = self.lists.wanted().spec.clone();
        let promised = self.lists.remote.promised().into_iter().filter_map(|key| {
            let (iohost, device) = &key;
            let mut serves = spec.serves.iter();
            let serve = serves.find(|serve| serve.iohost == *iohost && serve.fits(device));
            serve.map(|serve| (serve, key))
        });
        let mut again: Vec<_> = promised.collect();
        for name in exported {
            if !again.iter().any(|(_, (_, device))| device == name) {
                let maker = maker(&spec.serves, name);
                again.extend(maker.map(|serve| (serve, (serve.iohost.clone(), name.clone()))));
            }
        }
        for (serve, key) in again {
            if spec.devices.iter().any(|device| device.name == key.1) {
                continue;
            }
            let patterns = || self.patterns.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let obstacle = patterns().obstacle(serve, &key.1, &Changes::default());
            if let Some(reason) = obstacle {
                patterns().refuse(now, key, &serve.name, reason, false);
                continue;
            }
            let added = local(serve, &key.1)
                .and_then(|(device, store)| self.add_device(&device, Some(&store)));
            patterns().added(now, key, &serve.name, added);
        }
    }

    fn look_at_patterns(&self) {
        let serves = self.lists.wanted().spec.serves.clone();
        let patterns = || self.patterns.lock().unwrap_or_else(PoisonError::into_inner);
        if serves.is_empty() && patterns().made.is_empty() {
            return;
        }
        let report = self.lists.remote.report();
        let lists = report.iohosts.into_iter();
        let lists = lists.filter_map(|iohost| Some((iohost.name, iohost.announced?))).collect();
        let devices = self.devices();
        let used = |name: &str| match devices.iter().find(|device| device.name == name) {
            None => Use::None,
            Some(device) => match device.state {
                DeviceState::Waiting | DeviceState::Opening | DeviceState::Refused => Use::Unused,
                _ => Use::Used,
            },
        };
        let changes = patterns().look(Instant::now(), &serves, &lists, used);
        // The patterns are not locked meanwhile: reports are answered.
        for (key, serve) in changes.add {
            let added = local(&serve, &key.1)
                .and_then(|(device, store)| self.add_device(&device, Some(&store)));
            patterns().added(Instant::now(), key, &serve.name, added);
        }
        for key in changes.remove {
            tracing::info!(iohost = key.0, device = key.1, "the IOhost has it no longer");
            match self.remove_device(&key.1) {
                Ok(()) | Err(AssemblyError::NoDevice { .. }) => drop(patterns().made.remove(&key)),
                Err(error) => tracing::warn!(device = key.1, "not removed: {error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use sidecore_keys::{Value, Values};

    use super::*;
    use crate::spec::StageKind;

    fn serve(name: &str, pattern: &str, devices_max: usize) -> ServeSpec {
        ServeSpec {
            name: name.to_owned(),
            iohost: "io1".to_owned(),
            pattern: pattern.to_owned(),
            devices_max,
            device: DeviceSpec { socket: "/run/{device}.sock".into(), ..DeviceSpec::default() },
            stages: Vec::new(),
        }
    }

    fn lists(devices: &[&str]) -> BTreeMap<String, Vec<String>> {
        let devices = devices.iter().map(|device| (*device).to_owned()).collect();
        BTreeMap::from([("io1".to_owned(), devices)])
    }

    fn names(changes: &Changes) -> (Vec<&str>, Vec<&str>) {
        let add = changes.add.iter().map(|((_, device), _)| device.as_str());
        (add.collect(), changes.remove.iter().map(|(_, device)| device.as_str()).collect())
    }

    fn apply(patterns: &mut Patterns, now: Instant, changes: Changes) {
        for (key, serve) in changes.add {
            patterns.added(now, key, &serve.name, Ok(()));
        }
        for key in changes.remove {
            patterns.made.remove(&key);
        }
    }

    #[test]
    fn a_device_goes_when_its_iohost_is_there_without_it_and_no_vmm_uses_it() {
        let (mut patterns, begun) = (Patterns::default(), Instant::now());
        let serves = [serve("db", "db-*", 8)];
        let at = |seconds| begun + Duration::from_secs(seconds);
        let with = lists(&["db-1", "web-1"]);
        let changes = patterns.look(at(0), &serves, &with, |_| Use::None);
        assert_eq!(names(&changes), (vec!["db-1"], vec![]));
        apply(&mut patterns, at(0), changes);
        // The IOhost is away, and starts again without devices for a moment.
        let away = BTreeMap::new();
        assert_eq!(names(&patterns.look(at(9), &serves, &away, |_| Use::Unused)), (vec![], vec![]));
        let without = lists(&[]);
        for second in [20, 24] {
            let changes = patterns.look(at(second), &serves, &without, |_| Use::Unused);
            assert_eq!(names(&changes), (vec![], vec![]));
        }
        assert_eq!(
            names(&patterns.look(at(25), &serves, &with, |_| Use::Unused)),
            (vec![], vec![])
        );
        // It goes while a VMM uses it.
        for second in [30, 40] {
            let changes = patterns.look(at(second), &serves, &without, |_| Use::Used);
            assert_eq!(names(&changes), (vec![], vec![]));
        }
        assert_eq!(patterns.report(&serves)[0].leaving, ["db-1"]);
        let changes = patterns.look(at(41), &serves, &without, |_| Use::Unused);
        assert_eq!(names(&changes), (vec![], vec!["db-1"]));
        apply(&mut patterns, at(41), changes);
        assert!(patterns.report(&serves)[0].devices.is_empty());
    }

    #[test]
    fn a_device_that_an_operator_has_removed_stays_away_until_the_iohost_makes_it_again() {
        let (mut patterns, now) = (Patterns::default(), Instant::now());
        let serves = [serve("db", "*", 8)];
        let with = lists(&["a"]);
        let changes = patterns.look(now, &serves, &with, |_| Use::None);
        apply(&mut patterns, now, changes);
        let later = now + GRACE;
        assert_eq!(names(&patterns.look(later, &serves, &with, |_| Use::None)), (vec![], vec![]));
        assert!(patterns.report(&serves)[0].devices.is_empty());
        patterns.look(later, &serves, &lists(&[]), |_| Use::None);
        patterns.look(later + GRACE, &serves, &lists(&[]), |_| Use::None);
        let changes = patterns.look(later + GRACE, &serves, &with, |_| Use::None);
        assert_eq!(names(&changes), (vec!["a"], vec![]));
    }

    #[test]
    fn a_hostile_iohost_makes_no_more_devices_than_allowed_and_no_paths() {
        let (mut patterns, begun) = (Patterns::default(), Instant::now());
        let serves = [serve("all", "*", 20)];
        let many: Vec<String> = (0..2000).map(|number| format!("disk{number}")).collect();
        let bad = ["../../etc/x", "a/b", ".", "..", "", "-x", "\u{1b}[2J", "a b", "ä"];
        let all: Vec<&str> = bad.into_iter().chain(many.iter().map(String::as_str)).collect();
        let mut made = 0;
        for step in 0..10 {
            let now = begun + PERIOD * step;
            let changes = patterns.look(now, &serves, &lists(&all), |_| Use::Unused);
            assert!(changes.add.len() <= ADDITIONS && changes.remove.is_empty());
            assert!(changes.add.iter().all(|((_, device), _)| is_name(device)));
            made += changes.add.len();
            apply(&mut patterns, now, changes);
        }
        assert_eq!((made, patterns.made.len()), (20, 20));
        let report = patterns.report(&serves).remove(0);
        let reason = |device: &str| {
            let mut refused = report.refused.iter().filter(|refused| refused.device == device);
            refused.next().map(|refused| refused.reason.clone()).unwrap_or_default()
        };
        assert!(bad.iter().all(|device| reason(device).contains("its name is none")));
        assert!(reason("disk1999").contains("raise `devices_max`"));
        // Devices that come and go at each look are made once, and refusals are forgotten.
        for step in 10..20_u32 {
            let now = begun + PERIOD * step;
            let list = if step % 2 == 0 { lists(&["disk0"]) } else { lists(&[]) };
            let changes = patterns.look(now, &serves, &list, |_| Use::Unused);
            assert!(changes.add.is_empty());
        }
        assert!(patterns.refused.is_empty());
    }

    #[test]
    fn the_maker_of_a_device_is_known_unless_two_iohosts_may_have_it() {
        let other = |pattern| ServeSpec { iohost: "io2".to_owned(), ..serve("other", pattern, 8) };
        let maker = |serves: &[ServeSpec]| maker(serves, "db-1").map(|serve| serve.name.clone());
        let name = |name: &str| Some(name.to_owned());
        assert_eq!(maker(&[serve("web", "web-*", 8), serve("db", "db-*", 8)]), name("db"));
        assert_eq!(maker(&[serve("all", "*", 8), serve("db", "db-*", 8)]), name("all"));
        assert_eq!(maker(&[serve("db", "db-*", 8), other("web-*")]), name("db"));
        assert_eq!(maker(&[serve("db", "db-*", 8), other("*")]), None);
        assert_eq!(maker(&[]), None);
    }

    #[test]
    fn a_failed_attempt_is_shown_and_repeated_after_a_while() {
        let (mut patterns, now) = (Patterns::default(), Instant::now());
        let serves = [serve("db", "db-*", 8)];
        let list = lists(&["db-1"]);
        let mut changes = patterns.look(now, &serves, &list, |_| Use::None);
        let (key, serve) = changes.add.remove(0);
        let error = AssemblyError::Duplicate { kind: "device", name: "db-1".to_owned() };
        patterns.added(now, key, &serve.name, Err(error));
        assert!(patterns.report(&serves)[0].refused[0].reason.contains("db-1"));
        let soon = patterns.look(now + PERIOD, &serves, &list, |_| Use::None);
        assert_eq!(names(&soon), (vec![], vec![]));
        let later = patterns.look(now + RETRY, &serves, &list, |_| Use::None);
        assert_eq!(names(&later), (vec!["db-1"], vec![]));
    }

    #[test]
    fn the_local_device_has_the_name_in_its_socket() {
        let (device, store) = local(&serve("db", "*", 8), "db-1").unwrap();
        assert_eq!(device.socket.to_str(), Some("/run/db-1.sock"));
        assert_eq!((device.store.as_str(), device.store == store.name), ("io1/db-1@db-1", true));
        let mut long = serve("db", "*", 8);
        long.device.socket = format!("/{}/{{device}}.sock", "x".repeat(60)).into();
        assert!(local(&long, &"y".repeat(60)).is_err());
    }

    #[test]
    fn the_store_has_the_stages_of_its_pattern_with_the_name_in_their_texts() {
        let path = |path: &str| Value::Path(path.into());
        let keys = [("header", path("/k/{device}/a.luks")), ("key_file", path("/k/{device}.key"))];
        let mut serve = serve("db", "*", 8);
        serve.stages =
            vec![("read-only", Values::default()), ("encrypt", Values(BTreeMap::from(keys)))];
        let (_, store) = local(&serve, "db-1").unwrap();
        let words: Vec<&str> = store.stages.iter().map(StageSpec::word).collect();
        assert_eq!(words, ["read-only", "encrypt"]);
        let StageKind::Encrypt(stage) = &store.stages[1].kind else { panic!("{store:?}") };
        assert_eq!(stage.header.to_str(), Some("/k/db-1/a.luks"));
        assert_eq!(stage.key_file.to_str(), Some("/k/db-1.key"));
        serve.stages = vec![("no-such", Values::default())];
        assert!(local(&serve, "db-1").unwrap_err().to_string().contains("no such stage"));
    }
}
