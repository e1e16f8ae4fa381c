//! A connection to a member of etcd.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::Error as TlsError;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use crate::Endpoint;
use crate::access::{Access, User};

/// Larger than the keys of a large cluster.
const ANSWER_MAX_BYTES: usize = 4 << 20;
/// The characters of a text that are shown.
const TEXT_MAX: usize = 200;
/// The time in which a broken connection tells its fault.
const FAULT: Duration = Duration::from_millis(100);

/// An open connection, and the user that was logged in through it.
#[derive(Debug)]
pub(crate) struct Connection {
    endpoint: Endpoint,
    access: Access,
    sender: SendRequest<Full<Bytes>>,
    /// Ends with the sender.
    task: JoinHandle<hyper::Result<()>>,
    token: Option<Token>,
}

/// The proof that a user has given its password.
struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: StatusCode,
    body: Bytes,
}

impl Connection {
    /// Connects, by TLS if the endpoint has it.
    pub(crate) async fn open(endpoint: &Endpoint, access: &Access) -> Result<Self, String> {
        let stream = TcpStream::connect(endpoint.address()).await.map_err(|e| e.to_string())?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let (sender, task) = if endpoint.is_tls() {
            let name = ServerName::try_from(endpoint.host().to_owned())
                .map_err(|_| format!("\"{}\" is no name of a host", endpoint.host()))?;
            // Files can be slow, and this thread has the leases.
            let files = access.clone();
            let config = tokio::task::spawn_blocking(move || {
                files
                    .ca
                    .as_deref()
                    .ok_or_else(|| "no CA is given".to_owned())
                    .and_then(|ca| files.tls(ca))
            });
            let config = config.await.map_err(|error| error.to_string())??;
            let connected = TlsConnector::from(config).connect(name, stream).await;
            let stream = connected.map_err(|error| match error.kind() {
                // How a member without TLS ends it depends on what it has read by then.
                io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe => NO_TLS.to_owned(),
                _ => describe(&error, access, endpoint),
            })?;
            start(stream).await?
        } else {
            start(stream).await?
        };
        let (endpoint, access) = (endpoint.clone(), access.clone());
        Ok(Self { endpoint, access, sender, task, token: None })
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    pub(crate) const fn is_logged_in(&self) -> bool {
        self.token.is_some()
    }

    /// Gives the password, for a new token.
    pub(crate) async fn log_in(&mut self, user: &User) -> Result<(), String> {
        self.token = None;
        let file = user.clone();
        let password = tokio::task::spawn_blocking(move || file.password());
        let password = password.await.map_err(|error| error.to_string())??;
        let body = json!({ "name": user.name, "password": password });
        let answer = self.send("auth/authenticate", &body).await?.success("auth/authenticate");
        let answer = answer.map_err(|error| refused(&error, user))?;
        let token = answer.get("token").and_then(Value::as_str);
        self.token = Some(Token(token.ok_or("auth/authenticate gave no token")?.to_owned()));
        Ok(())
    }

    /// Sends a request, and waits for its answer.
    pub(crate) async fn send(&mut self, method: &str, body: &Value) -> Result<Response, String> {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("/v3/{method}"))
            .header(hyper::header::HOST, self.endpoint.address())
            .header(hyper::header::CONTENT_TYPE, "application/json");
        if let Some(Token(token)) = &self.token {
            request = request.header(hyper::header::AUTHORIZATION, token);
        }
        let request = request.body(Full::new(Bytes::from(body.to_string())));
        let request = request.map_err(|error| error.to_string())?;
        match self.exchange(request).await {
            Ok(response) => Ok(response),
            Err(error) => Err(self.fault(error.as_ref()).await),
        }
    }

    async fn exchange(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response, Box<dyn Error + Send + Sync>> {
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES).collect().await?;
        Ok(Response { status, body: body.to_bytes() })
    }

    /// The reason of an error. A member that refuses a certificate says so when the connection is
    /// open for its client, and the request may fail without that reason.
    async fn fault(&mut self, error: &(dyn Error + Send + Sync + 'static)) -> String {
        if self.endpoint.is_tls()
            && tls_error(error).is_none()
            && let Ok(Ok(Err(reason))) = tokio::time::timeout(FAULT, &mut self.task).await
            && tls_error(&reason).is_some()
        {
            return describe(&reason, &self.access, &self.endpoint);
        }
        describe(error, &self.access, &self.endpoint)
    }
}

impl Response {
    /// The answer in it.
    pub(crate) fn success(&self, method: &str) -> Result<Value, String> {
        let Self { status, body } = self;
        let answer: Value = match serde_json::from_slice(body) {
            Ok(answer) => answer,
            Err(error) if status.is_success() => {
                return Err(format!("{method} has no JSON for an answer ({status}): {error}"));
            }
            // Text of the gateway itself.
            Err(_) => {
                let text = String::from_utf8_lossy(body);
                Value::from(text.trim().chars().take(TEXT_MAX).collect::<String>())
            }
        };
        if status.is_success() {
            return Ok(answer);
        }
        let error = error_of(&answer);
        let remedy = REMEDIES.iter().find(|(text, _)| error.contains(text));
        let remedy = remedy.map_or(String::new(), |(_, remedy)| format!(": {remedy}"));
        Err(format!("{method}: {error} ({status}){remedy}"))
    }
}

/// An end of the connection in the handshake.
const NO_TLS: &str = "it ends a TLS handshake: if it has no TLS, give it as http://HOST:PORT";

/// Errors of an etcd with users.
const REMEDIES: [(&str, &str); 3] = [
    (
        "CommonName of client",
        "etcd has users, so give this host a certificate without a common name (CN)",
    ),
    ("user name is empty", "it has users: give a user and the file of its password"),
    ("permission denied", "give a user with a role that reads and writes the keys /sidecore/"),
];

fn refused(error: &str, user: &User) -> String {
    if error.contains("authentication failed") {
        return format!(
            "it refuses user \"{}\" with the password in {}: correct one of both ({error})",
            user.name,
            user.password.display()
        );
    }
    if error.contains("authentication is not enabled") {
        return format!("it has no users, and \"{}\" is given: leave the user out", user.name);
    }
    error.to_owned()
}

/// Starts the protocol on a connection.
async fn start(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
) -> Result<(SendRequest<Full<Bytes>>, JoinHandle<hyper::Result<()>>), String> {
    let (sender, connection) =
        handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    Ok((sender, tokio::spawn(connection)))
}

fn describe(error: &(dyn Error + 'static), access: &Access, endpoint: &Endpoint) -> String {
    match tls_error(error) {
        Some(error) => access.explain(error, endpoint.host()),
        None => error.to_string(),
    }
}

/// The error of TLS in an error.
fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a TlsError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<TlsError>() {
            return Some(found);
        }
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

/// The text of an error.
pub(crate) fn error_of(answer: &Value) -> String {
    let error = answer.get("error").unwrap_or(answer);
    let text = error.get("message").unwrap_or(error);
    text.as_str().map_or_else(|| text.to_string(), str::to_owned)
}
