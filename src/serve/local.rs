//! A server within this process, for measurements.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use selkie_core::session::Model;
use tokio::runtime::Runtime;

use super::{
    app::{App, Limits, Phase},
    host::Hosts,
    listen::{self, Connections},
    on_runtime,
    replicas::Replicas,
    router, runtime,
};
use crate::failure::{Failure, Outcome};

/// Longer than any measurement.
const LONG: Duration = Duration::from_secs(3600);

/// A server on a free local port, with the threads and checks of `selkie serve`, but without page and keys, and connections may be
/// silent for an hour. Dropping it ends it.
pub struct Local {
    /// Where it listens.
    pub address: SocketAddr,
    app: Arc<App>,
    /// `None` while this is dropped.
    runtime: Option<Runtime>,
}

impl Local {
    /// Serves a loaded model: at most `answers` answers and `connections` connections at a time.
    ///
    /// # Errors
    /// If there is no port, or there are no threads.
    pub fn start(model: Model, answers: usize, connections: usize) -> Outcome<Self> {
        let cannot = |e| Failure::Other(format!("cannot listen on a free local port: {e}"));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let limits = Limits { body: 1 << 30, state: 0, answer: LONG, handover: LONG };
        let mut app = App::new(vec!["bench".into()], answers, limits);
        app.hosts = Some(Hosts::new(address.port(), Vec::new()));
        let app = Arc::new(app);
        let _ = app.replicas.set(Replicas::new(vec![model]));
        let (runtime, phase) = (runtime()?, app.phase.subscribe());
        let rules = Connections { silence: LONG, ..Connections::new(connections) };
        let entered = runtime.enter();
        runtime.spawn(listen::serve(on_runtime(listener)?, router(app.clone()), rules, phase));
        drop(entered);
        Ok(Self { address, app, runtime: Some(runtime) })
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.app.phase.send_replace(Phase::Ending);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}
