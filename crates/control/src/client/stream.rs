//! The client's requests for frames as they come.

use std::io::{self, Write};

use http_body_util::BodyExt as _;
use hyper::Method;
use hyper::body::Incoming;

use super::{Client, ClientError, PATIENCE, escaped, port_path};
use crate::api::{CaptureQuery, SWITCHES_PATH, TraceQuery};

impl Client {
    /// Writes the frames of a port as they pass to the file that `open` opens once the capture has
    /// begun, in pcapng. Returns when the capture has ended, because of its limits or with its
    /// port.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn capture<W: Write>(
        &self,
        port: &str,
        query: &CaptureQuery,
        open: impl FnOnce() -> io::Result<W>,
    ) -> Result<(), ClientError> {
        self.stream(&(port_path(port, "capture") + &query.text()), open)
    }

    /// Writes the frames from and to a port as they are dropped, to the file that `open` opens once
    /// the trace has begun: a line of JSON, a [`DropReport`](crate::report::DropReport), for each
    /// flow, reason and second. Returns when the trace has ended, because of its limits or with its
    /// port.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn trace_port<W: Write>(
        &self,
        port: &str,
        query: &TraceQuery,
        open: impl FnOnce() -> io::Result<W>,
    ) -> Result<(), ClientError> {
        self.stream(&(port_path(port, "trace") + &query.text()), open)
    }

    /// As [`trace_port`](Self::trace_port), for all ports of a switch.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn trace_switch<W: Write>(
        &self,
        switch: &str,
        query: &TraceQuery,
        open: impl FnOnce() -> io::Result<W>,
    ) -> Result<(), ClientError> {
        let path = format!("{SWITCHES_PATH}/{}/trace{}", escaped(switch), query.text());
        self.stream(&path, open)
    }

    fn stream<W: Write>(
        &self,
        path: &str,
        open: impl FnOnce() -> io::Result<W>,
    ) -> Result<(), ClientError> {
        self.runtime.block_on(async {
            let head = tokio::time::timeout(PATIENCE, self.send(Method::GET, path, None)).await;
            let silent =
                |_| ClientError::Silent { socket: self.socket.clone(), patience: PATIENCE };
            let (response, connection) = head.map_err(silent)??;
            let written = if response.status().is_success() {
                self.write(response.into_body(), open).await
            } else {
                self.answer(path, response).await.map(drop)
            };
            connection.abort();
            written
        })
    }

    async fn write<W: Write>(
        &self,
        mut body: Incoming,
        open: impl FnOnce() -> io::Result<W>,
    ) -> Result<(), ClientError> {
        let mut file = open().map_err(ClientError::File)?;
        while let Some(part) = body.frame().await {
            let part = part.map_err(|error| self.failed(error))?;
            if let Ok(part) = part.into_data() {
                file.write_all(&part).map_err(ClientError::File)?;
            }
        }
        file.flush().map_err(ClientError::File)
    }
}
