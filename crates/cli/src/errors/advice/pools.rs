//! Advice on errors of XenServer and XCP-ng pools.

use holdfast_engine::XenBackupError;
use holdfast_host::xapi::XapiError;

use super::Advice;
use super::advice;
use crate::errors::Kind;
use crate::exit::Exit;

pub(super) fn xen_advice(error: &XenBackupError) -> Advice {
    match error {
        XenBackupError::Pool(error) => pool_advice(error),
        XenBackupError::Name { .. } => advice(
            Exit::Error,
            Kind::BadName,
            "give it a name of yours with --machine NAME",
        ),
        XenBackupError::NoWay { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "--pool-read vhd reads them without NBD, for which the host's port has to be reached from here",
        ),
        _ => advice(
            Exit::Error,
            Kind::Io,
            "the machine may have been changed at this moment: try again",
        ),
    }
}

fn pool_advice(error: &XapiError) -> Advice {
    match error {
        XapiError::Address { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "pools are named xen://HOST, and machines xen://HOST/NAME; the user, where it is not root, stands before the host: xen://backup@HOST/NAME",
        ),
        XapiError::Trust { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "openssl x509 -noout -fingerprint -sha256 -in /etc/xensource/xapi-ssl.pem prints the fingerprint on the host",
        ),
        XapiError::Untrusted { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "compare it with what openssl x509 -noout -fingerprint -sha256 -in /etc/xensource/xapi-ssl.pem prints on that host, and where it is the same, give it with --pool-certificate",
        ),
        XapiError::Connect { .. } => advice(
            Exit::Error,
            Kind::Io,
            "check the address: it is that of the pool's master, or of any host of it, and its HTTPS port has to be reached from here",
        ),
        XapiError::Broken { .. } => advice(
            Exit::Error,
            Kind::Io,
            "the network between, or the toolstack of the host, may have had a break: try again",
        ),
        XapiError::Login { .. } => advice(
            Exit::Error,
            Kind::Permission,
            "check the user in the address and the password; a user of its own with the role vm-power-admin is enough",
        ),
        XapiError::NoMachine { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast machines xen://HOST lists the machines of a pool",
        ),
        XapiError::SeveralMachines { .. } => advice(Exit::Error, Kind::Usage, "name it by its UUID"),
        XapiError::NoStorage { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "name one behind the pool: xen://HOST/STORAGE",
        ),
        XapiError::Refused { code, .. } if code == "SR_BACKEND_FAILURE_44" || code == "SR_FULL" => advice(
            Exit::Error,
            Kind::NoSpace,
            "make room in the storage repository, or name another one",
        ),
        XapiError::Refused { code, .. } if code == "RBAC_PERMISSION_DENIED" => advice(
            Exit::Error,
            Kind::Permission,
            "give the user the role vm-power-admin, or pool-operator to change what is tracked",
        ),
        XapiError::Refused { code, .. } if code == "OTHER_OPERATION_IN_PROGRESS" || code == "VDI_IN_USE" => {
            advice(Exit::Locked, Kind::Locked, "try again when it has ended")
        }
        XapiError::Refused { code, .. } if code == "SESSION_INVALID" => advice(
            Exit::Error,
            Kind::Io,
            "the pool ended the session repeatedly, as it does while its toolstack restarts: try again in a moment",
        ),
        _ => advice(
            Exit::Error,
            Kind::Io,
            "the log of the host (/var/log/xensource.log) says more",
        ),
    }
}
