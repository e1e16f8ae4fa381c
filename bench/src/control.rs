//! The daemon's control API, as far as the bench needs it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Sends a GET of `path` to the API on `socket` and returns the JSON of the response.
///
/// # Errors
/// The daemon does not answer, the status is not 200, or the body is not JSON.
pub fn get(socket: &Path, path: &str) -> Result<Value> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: sidecore\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).with_context(|| format!("no answer to GET {path}"))?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("GET {path}: not an HTTP response"))?;
    let status = head.split_whitespace().nth(1).unwrap_or_default();
    ensure!(status == "200", "GET {path}: {status}: {body}");
    serde_json::from_str(body).with_context(|| format!("GET {path}: not JSON"))
}
