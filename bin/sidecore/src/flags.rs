//! Flags that are made from the tables of keys.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use serde_json::{Map, Value};
use sidecore_control::config::keys::{self, FormatSpec, Key, Kind};
use sidecore_control::config::size;

/// Keys of a device for which `device add` has arguments of another form.
const DEVICE_APART: &[&str] =
    &["name", "socket", "store", "sidecore", "sidecores", "iohost", "device"];

/// Keys of a volume for which `device add` has arguments of another form.
const VOLUME_APART: &[&str] = &["controller", "volume", "size", "quota", "read_only"];

/// Keys that devices of a pattern do not have, or that are an argument without a flag.
const SERVE_APART: &[&str] = &["name", "socket", "serial", "client"];

/// The name is an argument without a flag.
const NAME: &[&str] = &["name"];

/// The keys of a device that were given as flags.
pub(crate) struct DeviceFlags(pub(crate) Map<String, Value>);

/// The keys of a virtual function that were given as flags.
pub(crate) struct VolumeFlags(pub(crate) Map<String, Value>);

/// The keys of a link that were given as flags.
pub(crate) struct LinkFlags(pub(crate) Map<String, Value>);

/// The keys of a client that were given as flags.
pub(crate) struct ClientFlags(pub(crate) Map<String, Value>);

/// The keys of an IOhost that were given as flags.
pub(crate) struct IohostFlags(pub(crate) Map<String, Value>);

/// The keys of a pattern that were given as flags.
pub(crate) struct ServeFlags(pub(crate) Map<String, Value>);

/// The format of a store that was given as flags.
pub(crate) struct FormatFlags(pub(crate) FormatSpec);

/// Keys that several types have are one flag. `apart` are those with another form.
fn once(
    all: impl Iterator<Item = &'static Key>,
    apart: &[&str],
) -> impl Iterator<Item = &'static Key> {
    let mut keys: Vec<&'static Key> = Vec::new();
    for key in all {
        let is_known = keys.iter().any(|known| known.name == key.name);
        if !is_known && !apart.contains(&key.name) {
            keys.push(key);
        }
    }
    keys.into_iter()
}

fn device_keys() -> impl Iterator<Item = &'static Key> {
    once(keys::device().chain(keys::front_ends()), DEVICE_APART)
}

fn link_keys() -> impl Iterator<Item = &'static Key> {
    once(keys::link().chain(keys::of_links()), NAME)
}

fn client_keys() -> impl Iterator<Item = &'static Key> {
    once(keys::client(), NAME)
}

fn iohost_keys() -> impl Iterator<Item = &'static Key> {
    once(keys::IOHOST.iter(), NAME)
}

fn serve_keys() -> impl Iterator<Item = &'static Key> {
    once(keys::serve().chain(keys::front_ends_of_disks()), SERVE_APART)
}

fn volume_keys() -> impl Iterator<Item = &'static Key> {
    keys::VOLUME.iter().chain([&keys::STAGE]).filter(|key| !VOLUME_APART.contains(&key.name))
}

macro_rules! flags {
    ($($Flags:ident: $args:expr, $read:expr;)*) => {$(
        impl Args for $Flags {
            fn augment_args(command: Command) -> Command {
                command.args($args)
            }

            fn augment_args_for_update(command: Command) -> Command {
                Self::augment_args(command)
            }
        }

        impl FromArgMatches for $Flags {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
                Ok(Self($read(matches)))
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }
    )*};
}

flags! {
    DeviceFlags: device_keys().map(flag), |matches| values(matches, device_keys());
    VolumeFlags: volume_keys().map(volume_flag), |matches| values(matches, volume_keys());
    LinkFlags: link_keys().map(flag), |matches| values(matches, link_keys());
    ClientFlags: client_keys().map(flag), |matches| values(matches, client_keys());
    IohostFlags: iohost_keys().map(flag), |matches| values(matches, iohost_keys());
    ServeFlags: serve_keys().map(flag), |matches| values(matches, serve_keys());
    FormatFlags: FormatSpec::KEYS.iter().map(flag), format;
}

fn volume_flag(key: &'static Key) -> Arg {
    // A disk of an IOhost has stages, too.
    let others: &[&str] =
        if key.name == keys::STAGE.name { &["store"] } else { &["store", "iohost"] };
    let flag = flag(key).conflicts_with_all(others);
    match key.name.strip_suffix("_burst") {
        Some(rate) => flag.requires(rate),
        None => flag,
    }
}

fn format(matches: &ArgMatches) -> FormatSpec {
    let value = |key: &Key| {
        let value = match key.kind {
            Kind::Size => keys::Value::Number(*matches.get_one::<u64>(key.name)?),
            _ => keys::Value::Text(matches.get_one::<String>(key.name)?.clone()),
        };
        Some((key.name, value))
    };
    FormatSpec::from_values(&keys::Values(FormatSpec::KEYS.iter().filter_map(value).collect()))
}

/// The flag of a key, with underscores: a link's socket is not the control socket.
fn name(key: &Key) -> &'static str {
    if key.name == "socket" { "memory_socket" } else { key.name }
}

/// The flag of a key. The rules of one key are checked here, the others by the daemon.
fn flag(key: &'static Key) -> Arg {
    let name = name(key);
    let flag = Arg::new(name).long(name.replace('_', "-")).help(keys::sentence(key.meaning));
    match key.kind {
        Kind::Flag(false) => flag.action(ArgAction::SetTrue),
        Kind::Flag(true) => flag.value_name("BOOL").value_parser(clap::value_parser!(bool)),
        Kind::Number(..) => flag.value_name("NUMBER").value_parser(clap::value_parser!(u64)),
        Kind::Size => flag.value_name("SIZE").value_parser(move |text: &str| {
            let bytes = size::parse(text)?;
            (key.check)(key.name, &keys::Value::Number(bytes)).map(|()| bytes)
        }),
        Kind::Word(words) => flag.value_name(words.join("|")),
        Kind::Sections(..) => {
            flag.value_name("TYPE[,KEY=VALUE]...").action(ArgAction::Append).value_parser(section)
        }
        Kind::Text => flag.value_name("TEXT").value_parser(move |text: &str| {
            (key.check)(key.name, &keys::Value::Text(text.to_owned())).map(|()| text.to_owned())
        }),
        Kind::Texts => {
            flag.value_name("TEXT[,TEXT]...").action(ArgAction::Append).value_delimiter(',')
        }
        Kind::Lines => flag.value_name("TEXT").action(ArgAction::Append),
        // The daemon has another working directory.
        Kind::Path => flag.value_name("PATH").value_parser(|text: &str| {
            let path = std::path::absolute(text).map_err(|error| error.to_string())?;
            path.into_os_string().into_string().map_err(|_| "it is not UTF-8".to_owned())
        }),
        Kind::Ranges => flag.value_name("[[FIRST, LAST], ...]").value_parser(|text: &str| {
            serde_json::from_str::<Value>(text).map_err(|error| error.to_string())
        }),
    }
}

/// A section: its type, and its keys with their values, separated by commas. A comma without a key
/// behind it belongs to the value before it.
fn section(text: &str) -> Result<Value, String> {
    let mut parts = text.split(',');
    let mut keys = vec![("type", parts.next().unwrap_or_default().to_owned())];
    for part in parts {
        if let Some((key, value)) = part.split_once('=') {
            keys.push((key, value.to_owned()));
            continue;
        }
        match keys.last_mut() {
            Some((key, value)) if *key != "type" => {
                value.push(',');
                value.push_str(part);
            }
            _ => return Err(format!("`{part}` is not KEY=VALUE, as in `delay,delay_us=100`")),
        }
    }
    Ok(keys.into_iter().map(|(key, text)| (key.to_owned(), value(&text))).collect())
}

/// A value of a key of a section: a number, a list, true or false, or else text.
pub(crate) fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

fn values(matches: &ArgMatches, keys: impl Iterator<Item = &'static Key>) -> Map<String, Value> {
    let value = |key: &'static Key| {
        let value = match key.kind {
            Kind::Flag(usual) => {
                let flag = *matches.get_one::<bool>(name(key))?;
                (flag != usual).then_some(flag)?.into()
            }
            Kind::Number(..) | Kind::Size => (*matches.get_one::<u64>(name(key))?).into(),
            Kind::Ranges => matches.get_one::<Value>(name(key))?.clone(),
            Kind::Sections(..) => matches.get_many::<Value>(name(key))?.cloned().collect(),
            Kind::Texts | Kind::Lines => matches.get_many::<String>(name(key))?.cloned().collect(),
            _ => matches.get_one::<String>(name(key))?.as_str().into(),
        };
        Some((key.name.to_owned(), value))
    };
    keys.filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_format_has_the_rules_of_its_keys() {
        let read = |arguments: &[&str]| {
            let arguments = [&["format"], arguments].concat();
            FormatFlags::augment_args(Command::new("format"))
                .try_get_matches_from(arguments)
                .map(|found| format(&found))
        };
        assert_eq!(read(&[]).unwrap(), FormatSpec::default());
        let format = FormatSpec { block_bytes: 4096, label: "x".to_owned() };
        assert_eq!(read(&["--block-size", "4KiB", "--label", "x"]).unwrap(), format);
        let error = read(&["--block-size", "2KiB"]).unwrap_err().to_string();
        assert!(error.contains("2KiB is none of 512"), "{error}");
        assert!(read(&["--label", &"x".repeat(65)]).is_err());
    }

    #[test]
    fn a_link_has_the_flags_of_all_types() {
        let read = |arguments: &[&str]| {
            let arguments = [&["add"], arguments].concat();
            let command = LinkFlags::augment_args(Command::new("add"));
            values(&command.try_get_matches_from(arguments).unwrap(), link_keys())
        };
        let keys = read(&["--type", "memory", "--memory-socket", "/w", "--sidecores", "a,b"]);
        let keys = Value::Object(keys);
        assert_eq!(keys, json!({ "type": "memory", "socket": "/w", "sidecores": ["a", "b"] }));
        let keys = Value::Object(read(&["--type=xdp", "--interface=eth1", "--frame-size=9000"]));
        assert_eq!(keys, json!({ "type": "xdp", "interface": "eth1", "frame_size": 9000 }));
    }

    #[test]
    fn a_section_is_its_type_and_its_keys() {
        assert_eq!(section("delay,delay_us=100"), Ok(json!({ "type": "delay", "delay_us": 100 })));
        let fault = json!({ "type": "fault", "ranges": [[0, 7], [64, 64]], "x": "a,b", "y": true });
        assert_eq!(section("fault,ranges=[[0,7],[64,64]],x=a,b,y=true"), Ok(fault));
        assert_eq!(section("delay"), Ok(json!({ "type": "delay" })));
        assert!(section("delay,100").unwrap_err().contains("`100` is not KEY=VALUE"));
    }
}
